"""One leader's term: turns what workers, gateways and the store say into core calls, and the core's answers into messages.

Every event ends with `_settle`: changes become one numbered record, workers get their next batches, and what the journal has made
durable becomes due to the gateways. Only a request that comes or is left while no worker takes a batch leaves that to the next event. Batches
leave before records are written: the wait for the store overlaps the forward pass.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

import structlog

from services.rpc.errors import TOKENIZER_MISMATCH, FailedPrecondition
from services.scheduler.admin_desk import AdminDesk
from services.scheduler.clock import now_us
from services.scheduler.core.committed_output import CommittedOutput
from services.scheduler.core.journal import Journal, WorkerStep
from services.scheduler.core.journal_call import JournalCall, JournalReply
from services.scheduler.core.recovered import Recovered
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.streams import Streams
from services.scheduler.core.worker_loss import LEFT, WorkerLoss
from services.scheduler.idle_watch import IdleWatch
from services.scheduler.kv_watch import KvWatch
from services.scheduler.leader_sight import LeaderSight
from services.scheduler.notice import Notice
from services.scheduler.request_desk import RequestDesk
from services.scheduler.sessions import GatewaySession, Said
from services.scheduler.spec_log import SpecLog
from tessera.values.admin import AdminQuery
from tessera.values.batch import ScheduledBatch, ScheduledBatchOutput
from tessera.values.config import Config
from tessera.values.identity import Epoch
from tessera.values.kv_events import WatchKv
from tessera.values.model import ModelInfo
from tessera.values.report import WorkerReport
from tessera.values.request import RequestOutput
from tessera.values.session import (
    Hello,
    HelloAck,
    LengthChanged,
    StopFound,
    Submit,
)

if TYPE_CHECKING:
    from services.scheduler.request_traces import RequestTraces

_log = structlog.get_logger()

LOAD_EVERY_US = 500_000
"""So often gateways are told the load of the group."""


class Leader:
    """From a join on, whose records so far are numbered up to `last_record`. Nothing but `lead` is called before that; all calls come from
    one event loop. While `may_speak` says no, nothing is decided or written."""

    def __init__(
        self,
        config: Config,
        epoch: Epoch,
        model: ModelInfo,
        last_record: int,
        wake_journal: Callable[[], None],
        clock: Callable[[], int] = now_us,
        may_speak: Callable[[], bool] = lambda: True,
    ) -> None:
        self.epoch = epoch
        self.scheduler = Scheduler(config, epoch)
        self.traces: RequestTraces | None = None  # who is told of what each turn changed, set before `lead`
        self._config = config
        self._model = model
        self._clock = clock
        self._may_speak = may_speak
        self._journal = Journal(config, epoch.number, last_record)
        self._streams: Streams[GatewaySession] = Streams(config, self._read_output)
        self._desk = RequestDesk(self.scheduler, self._streams, model, clock)
        self._admin_desk = AdminDesk(self.scheduler.admin, self.sight, lambda: self.scheduler.load_meter.read(clock()), clock)
        self._wake_journal = wake_journal
        self._senders: dict[str, Callable[[ScheduledBatch], None]] = {}
        self._sessions: dict[bytes, GatewaySession] = {}  # the latest of each gateway
        self._orphans_until_us: int | None = None  # while there may be some
        self._broken: Exception | None = None  # why nothing more may be sent or written
        self._handing_over = False
        self._idle_watch = IdleWatch(self.scheduler)
        self._shortage = Notice(_log)
        self._length_told = 0
        self._load_due_us = 0
        self._spec_log = SpecLog()
        self._kv_watch = KvWatch(lambda: self.scheduler.attached)

    def lead(
        self, recovered: Recovered, reports: dict[str, WorkerReport], senders: dict[str, Callable[[ScheduledBatch], None]]
    ) -> None:
        """Start from a join. The first record holds everything, and nothing is shown before it is written."""
        now, self._senders = self._clock(), senders
        self._orphans_until_us = now + 1000 * self._config.gateway_grace_ms
        self.scheduler.restore(recovered, reports, now)
        self._tell_length()
        self._settle(None)

    # -- workers

    def worker_attached(self, address: str, report: WorkerReport, send: Callable[[ScheduledBatch], None]) -> None:
        """A worker came back after this leader began. Raises ModelMismatch, and sends it nothing."""
        layout = self.scheduler.layout
        self.scheduler.attach_worker(address, report, self._clock())
        if layout is not None and layout != self.scheduler.layout:
            _log.warning(
                "kv layout changed", worker=address, before=layout, now=self.scheduler.layout, effect="all is computed again"
            )
        self._senders[address] = send
        self._tell_length()
        self._settle(None)

    def worker_output(self, address: str, output: ScheduledBatchOutput) -> None:
        """One batch was executed."""
        self.scheduler.postprocess(address, output, self._clock())
        replica = self.scheduler.replica(address)
        assert replica is not None, "only an attached worker answers"
        self._settle(WorkerStep(address, replica.boot_id, output.step_id))

    def worker_detached(self, address: str, loss: WorkerLoss = LEFT) -> None:
        """Its stream ended: its requests wait, and go on here or elsewhere."""
        self._senders.pop(address, None)
        self._kv_watch.lost(address)
        self.scheduler.lose_worker(address, loss, self._clock())
        self._settle(None)

    def worker_leaving(self, address: str) -> None:
        """It is to end: its requests go elsewhere while it computes on."""
        self.scheduler.worker_leaves(address)
        self._settle(None)

    def worker_removed(self, address: str) -> None:
        """It is no longer one of ours, and detached."""
        self.scheduler.remove_worker(address, self._clock())
        self._tell_length()
        self._settle(None)

    def _tell_length(self) -> None:
        length = self.scheduler.request_len_max
        if length is not None and length != self._length_told:
            self._length_told = length
            for session in self._sessions.values():
                session.post(LengthChanged(length))

    def _tell_load(self, now_us: int) -> None:
        if now_us < self._load_due_us or not self._may_speak():
            return
        self._load_due_us = now_us + LOAD_EVERY_US
        load = self.scheduler.load_meter.read(now_us)
        for session in self._sessions.values():
            session.post(load)

    # -- gateways

    def session_opened(self, session: GatewaySession, hello: Hello) -> HelloAck:
        """Take a gateway's claims on the requests that it still streams. Its earlier session ends: what still comes of that was said
        before, and would take over what is claimed now."""
        if hello.tokenizer_digest != self._model.tokenizer_digest:
            raise FailedPrecondition(
                f"the gateway's tokenizer ({hello.tokenizer_digest}) is not that of {self._model.name} "
                f"({self._model.tokenizer_digest}): start both with the same --model",
                reason=TOKENIZER_MISMATCH,
            )
        earlier = self._sessions.get(session.gateway_id)
        if earlier is not None and earlier is not session:
            earlier.close()
        self._sessions[session.gateway_id] = session
        with self._whole_or_over():
            unknown = [live.request_id for live in hello.live if not self._desk.claim_live(session, live)]
        self._settle(None)
        return HelloAck(tuple(unknown), self._model, self._length_told)

    def heard(self, session: GatewaySession, message: Said) -> None:
        """One message of a gateway. What it says of a request counts only while the request is its own, and nothing on a session that ends."""
        if session.closing:
            return
        if isinstance(message, WatchKv):
            self._kv_watch.watch(session, message.is_on)
            return
        with self._whole_or_over():
            if isinstance(message, Submit):
                if self._desk.submit(session, message) and self.scheduler.is_busy and self._broken is None:
                    return  # many come at once: the output of the oldest batch, or the next tick, settles for all of them
            elif isinstance(message, AdminQuery):
                self._admin_desk.heard(session, message)
            else:
                request_id = self._streams.claimed_by(session, message.request_id, message.subscriber)
                if request_id is not None:
                    self._desk.heard_of(request_id, message)
                if not isinstance(message, StopFound) and self.scheduler.is_busy and self._broken is None:
                    return  # as above: thousands of clients may leave at once
        self._settle(None)

    def take_frame(self, session: GatewaySession) -> Sequence[RequestOutput]:
        """Everything due to a gateway."""
        return self._streams.take_frame(session)

    def session_closed(self, session: GatewaySession) -> None:
        """The gateway may come back within `gateway_grace_ms`."""
        if self._sessions.get(session.gateway_id) is session:
            del self._sessions[session.gateway_id]
        self._streams.close(session, self._clock())
        self._kv_watch.forget(session)

    def hand_over(self) -> None:
        """Send no more batches: what runs goes on under the next leader. What comes is still taken in and written."""
        self._handing_over = True

    # -- journal

    def next_journal_call(self) -> JournalCall | None:
        """See `JournalOwner`."""
        if self._broken is not None or not self._may_speak():
            return None
        return self._journal.next_call(self._clock())

    def store_was_emptied(self) -> None:
        """The store holds nothing of what it acknowledged: it is to be written again."""
        self._journal.store_was_emptied()
        self._wake_journal()

    def journal_replied(self, reply: JournalReply) -> None:
        """See `JournalOwner`."""
        self._journal.on_reply(reply, self._clock())
        self._note_durable_steps()
        self._release()

    def journal_wake_us(self) -> int | None:
        """See `JournalOwner`."""
        return self._journal.wake_us(self._clock())

    @property
    def superseded(self) -> Epoch | None:
        """The epoch that ended this term, where the store has told of one."""
        return self._journal.superseded

    @property
    def is_durable(self) -> bool:
        """Whether the store keeps up."""
        return self._journal.is_durable(self._clock())

    @property
    def is_written(self) -> bool:
        """Whether the store has acknowledged every record."""
        return self._journal.acked == self._journal.last_record

    @property
    def is_stored(self) -> bool:
        """Whether the store has acknowledged the whole state, and has not been seen to lose it."""
        return self._journal.is_stored

    def sight(self) -> LeaderSight:
        """What there is to see at this moment."""
        unsent = {session.gateway_id.hex(): count for session, count in self._streams.unsent_tokens.items()}
        return LeaderSight.of(self._model.name, self.epoch.number, self.scheduler, self._journal, unsent, self._clock())

    # -- time

    def tick(self) -> None:
        """What happens by the passing of time alone; called every few tens of milliseconds."""
        now = self._clock()
        self.scheduler.forget_finished(now, self._streams.is_owed)
        self.scheduler.end_late(now)
        for request_id in self._streams.expired(now):
            self.scheduler.abort(request_id, now)
        if self._orphans_until_us is not None and now >= self._orphans_until_us:
            self._orphans_until_us = None
            self.scheduler.expire_orphans()
        if (shortage := self.scheduler.end_unheld(now)) is None:
            self._shortage.end("no request waits for a larger worker")
        else:
            self._shortage.say("requests wait for a larger worker", wait_ms=self._config.capacity_wait_ms, **asdict(shortage))
        self._spec_log.look(self.scheduler.spec_stats)
        self._tell_load(now)
        self._settle(None)
        self._idle_watch.look(now)

    # -- inside

    @contextmanager
    def _whole_or_over(self) -> Iterator[None]:
        """What a gateway says is applied wholly, or this term is over: an error raised by it ends only its session if all parts still
        tell one story. Else the next `tick` raises it, and until then nothing is decided or written: who leads next starts from
        what was written before."""
        try:
            yield
        except Exception as error:
            self._broken = error
            self.scheduler.check_integrity()
            self._broken = None
            raise

    def _read_output(self, request_id: bytes, first: int, end: int) -> CommittedOutput:
        sequence = self.scheduler.request(request_id)
        assert sequence is not None, "only a known request has something due"
        return sequence.committed_output(first, end)

    def _settle(self, step: WorkerStep | None) -> None:
        """Every event ends here. What fails in between leaves half a turn behind: nothing goes on from that."""
        if self._broken is not None:
            raise self._broken
        try:
            self._turn(step)
        except Exception as error:
            self._broken = error
            raise

    def _turn(self, step: WorkerStep | None) -> None:
        self._send_batches()
        changes = self.scheduler.take_changes()
        if changes is not None:
            if self.traces is not None:
                self.traces.note(changes.requests)
            record = self._journal.add(changes, self._clock(), step)
            self._streams.add(record, self._clock())
            if self._kv_watch and changes.blocks:
                self._kv_watch.changed(changes.blocks)
            self._wake_journal()
        elif step is not None:
            self._journal.cover(step)
            self._note_durable_steps()
        self._release()

    def _send_batches(self) -> None:
        """Until nobody has anything left to do: a worker can find work for those before it in the turn."""
        if self._handing_over or not self._may_speak():
            return
        for turn in range(len(self._senders)):
            has_sent = False
            for address, send in self._senders.items():
                while (batch := self.scheduler.schedule(address, self._clock())) is not None:
                    send(batch)
                    has_sent = True
            if turn and not has_sent:
                return

    def _note_durable_steps(self) -> None:
        for address in self._senders:
            replica = self.scheduler.replica(address)
            if replica is not None:
                self.scheduler.set_durable_step(address, replica.boot_id, self._journal.durable_step(address, replica.boot_id))

    def _release(self) -> None:
        self._streams.release(self._journal.acked, self.is_durable)
        self._admin_desk.release(self._journal.acked, self._journal.last_record, self.is_durable)
        for session in self._streams.due_sessions:
            session.wake()
