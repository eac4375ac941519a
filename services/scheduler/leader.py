"""One leader's term: turns what workers, gateways and the store say into core calls, and the core's answers into messages.

Every event ends with `_settle`: changes become one numbered record, workers get their next batches, and what the journal has made
durable becomes due to the gateways. Batches leave before records are written: the wait for the store overlaps the forward pass.
"""

from collections.abc import Callable
from dataclasses import asdict

import structlog

from services.rpc.errors import TOKENIZER_MISMATCH, FailedPrecondition
from services.scheduler.clock import now_us
from services.scheduler.core.admission import Admitted, Known, RefusalReason, Refused, Unknown
from services.scheduler.core.journal import Journal, WorkerStep
from services.scheduler.core.journal_call import JournalCall, JournalReply
from services.scheduler.core.recovered import Recovered
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.streams import Claimed, Streams
from services.scheduler.sessions import GatewaySession
from tessera.values.batch import ScheduledBatch, ScheduledBatchOutput
from tessera.values.config import Config
from tessera.values.identity import Epoch
from tessera.values.model import ModelInfo
from tessera.values.report import WorkerReport
from tessera.values.request import RequestOutput
from tessera.values.session import Abort, Hello, HelloAck, Rejected, RejectReason, StopFound, Submit, TakenOver

_log = structlog.get_logger()

INTEGRITY_IDLE_US = 2_000_000
"""Idle time after which the cores are checked: it costs a pass over all blocks."""

_REJECT = {
    RefusalReason.TOO_LONG: RejectReason.TOO_LONG,
    RefusalReason.OVERLOADED: RejectReason.OVERLOADED,
    RefusalReason.ALREADY_EXISTS: RejectReason.ALREADY_EXISTS,
    RefusalReason.NO_WORKER: RejectReason.OVERLOADED,
}


class Leader:
    """From a taken epoch on. Until `lead` is called it only answers reads; the shell calls it from one event loop."""

    def __init__(
        self,
        config: Config,
        epoch: Epoch,
        model: ModelInfo,
        wake_journal: Callable[[], None],
        clock: Callable[[], int] = now_us,
    ) -> None:
        self.epoch = epoch
        self.scheduler = Scheduler(config, epoch)
        self._config = config
        self._model = model
        self._clock = clock
        self._journal = Journal(config, epoch.number, 0)
        self._streams: Streams[GatewaySession] = Streams(config, self._read_output)
        self._wake_journal = wake_journal
        self._senders: dict[str, Callable[[ScheduledBatch], None]] = {}
        self._sessions: set[GatewaySession] = set()
        self._orphans_until_us: int | None = None  # while there may be some
        self._draining = False
        self._idle_since_us: int | None = None
        self._is_checked = False

    def lead(
        self, recovered: Recovered, reports: dict[str, WorkerReport], senders: dict[str, Callable[[ScheduledBatch], None]]
    ) -> None:
        """Start from a join. The first record holds everything, and nothing is shown before it is written."""
        now = self._clock()
        self._journal = Journal(self._config, self.epoch.number, recovered.last_record)
        self._senders = senders
        self._orphans_until_us = now + 1000 * self._config.gateway_grace_ms
        self.scheduler.restore(recovered, reports, now)
        self._settle(None)

    # -- workers

    def worker_attached(self, address: str, report: WorkerReport, send: Callable[[ScheduledBatch], None]) -> None:
        """A worker came back after this leader began. Raises ModelMismatch, and sends it nothing."""
        self.scheduler.attach_worker(address, report, self._clock())
        self._senders[address] = send
        self._settle(None)

    def worker_output(self, address: str, output: ScheduledBatchOutput) -> None:
        """One batch was executed."""
        self.scheduler.postprocess(address, output, self._clock())
        replica = self.scheduler.replica(address)
        assert replica is not None, "only an attached worker answers"
        self._settle(WorkerStep(address, replica.boot_id, output.step_id))

    def worker_detached(self, address: str) -> None:
        """Its stream ended: its requests wait until it, or its next boot, is attached again."""
        self._senders.pop(address, None)
        self.scheduler.lose_worker(address)
        self._settle(None)

    # -- gateways

    def session_opened(self, session: GatewaySession, hello: Hello) -> HelloAck:
        """Take a gateway's claims on the requests that it still streams."""
        if hello.tokenizer_digest != self._model.tokenizer_digest:
            raise FailedPrecondition(
                f"the gateway's tokenizer ({hello.tokenizer_digest}) is not that of {self._model.name} "
                f"({self._model.tokenizer_digest}): start both with the same --model",
                reason=TOKENIZER_MISMATCH,
            )
        self._sessions.add(session)
        unknown = []
        for live in hello.live:
            if self._foreign_id(live.token_ids) is not None:  # the gateway submits it again, and that is answered
                unknown.append(live.request_id)
                continue
            answer = self.scheduler.claim(live.request_id, live.subscriber, live.token_ids, self._clock())
            if isinstance(answer, Unknown):
                unknown.append(live.request_id)
            else:
                self._claim(session, live.request_id, live.subscriber, len(live.token_ids))
        self._settle(None)
        length = self.scheduler.request_len_max
        assert length is not None, "a leader has had a worker"
        return HelloAck(tuple(unknown), self._model, length)

    def heard(self, session: GatewaySession, message: Submit | Abort | StopFound) -> None:
        """One message of a gateway."""
        match message:
            case Submit():
                self._submit(session, message)
            case Abort(request_id, subscriber) if self._counts(request_id, subscriber):
                self.scheduler.abort(request_id, self._clock())
            case StopFound(request_id, subscriber, output_len, stop_string) if self._counts(request_id, subscriber):
                self.scheduler.stop_found(request_id, output_len, stop_string, self._clock())
        self._settle(None)

    def take_frame(self, session: GatewaySession) -> list[RequestOutput]:
        """Everything due to a gateway."""
        return self._streams.take_frame(session)

    def session_closed(self, session: GatewaySession) -> None:
        """The gateway may come back within `gateway_grace_ms`."""
        self._sessions.discard(session)
        self._streams.close(session, self._clock())

    def drain(self) -> None:
        """Admit nothing new."""
        self._draining = True

    def close_sessions(self) -> None:
        """End every stream: this term is over."""
        for session in self._sessions:
            session.close()

    # -- journal

    def next_journal_call(self) -> JournalCall | None:
        """See `JournalOwner`."""
        return self._journal.next_call(self._clock())

    def journal_replied(self, reply: JournalReply) -> None:
        """See `JournalOwner`."""
        self._journal.on_reply(reply, self._clock())
        for address in self._senders:
            replica = self.scheduler.replica(address)
            if replica is not None:
                step = self._journal.durable_step(address, replica.boot_id)
                self.scheduler.set_durable_step(address, replica.boot_id, step)
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
    def is_idle(self) -> bool:
        """Whether no request runs or waits, and the store has everything."""
        load = self.scheduler.load()
        return not load.num_running and not load.num_waiting and self._journal.acked == self._journal.last_record

    # -- time

    def tick(self) -> None:
        """What happens by the passing of time alone; called every few tens of milliseconds."""
        now = self._clock()
        self.scheduler.forget_finished(now)
        for request_id in self._streams.expired(now):
            self.scheduler.abort(request_id, now)
        if self._orphans_until_us is not None and now >= self._orphans_until_us:
            self._orphans_until_us = None
            self.scheduler.expire_orphans()
        self._settle(None)
        self._note_idle(now)

    def _note_idle(self, now: int) -> None:
        """Say once per idle time how much there is, and check once that all parts tell one story."""
        load = self.scheduler.load()
        if load.num_running or load.num_waiting:
            self._idle_since_us, self._is_checked = None, False
        elif self._idle_since_us is None:
            self._idle_since_us = now
            _log.debug("idle", **asdict(load))
        elif not self._is_checked and now - self._idle_since_us >= INTEGRITY_IDLE_US:
            self._is_checked = True
            self.scheduler.check_integrity()

    # -- inside

    def _submit(self, session: GatewaySession, submit: Submit) -> None:
        request_id = submit.submission.request_id
        is_new = not submit.received_token_ids and self.scheduler.request(request_id) is None
        if self._draining and is_new:  # one that had begun is taken: the next scheduler goes on with it
            rejected = Rejected(request_id, submit.subscriber, RejectReason.DRAINING, "the scheduler is shutting down", 1000)
            session.post(rejected)
            return
        foreign_id = self._foreign_id((int(submit.submission.prompt_token_ids.max()), *submit.received_token_ids))
        if foreign_id is not None:
            message = f"token id {foreign_id} is not in the vocabulary of {self._model.vocab_size}"
            session.post(Rejected(request_id, submit.subscriber, RejectReason.INVALID, message))
            return
        answer = self.scheduler.submit(submit.submission, submit.subscriber, submit.received_token_ids, self._clock())
        match answer:
            case Admitted():
                self._claim(session, request_id, submit.subscriber, len(submit.received_token_ids))
            case Known() if answer.request_id != request_id:
                name = submit.submission.client_request_id
                message = f"a request with the id {name!r} is running"
                session.post(Rejected(request_id, submit.subscriber, RejectReason.ALREADY_EXISTS, message))
            case Known():
                self._claim(session, request_id, submit.subscriber, len(submit.received_token_ids))
            case Refused():
                rejected = Rejected(
                    request_id, submit.subscriber, _REJECT[answer.reason], answer.message, answer.retry_after_ms
                )
                session.post(rejected)

    def _foreign_id(self, token_ids: tuple[int, ...]) -> int | None:
        """The highest id where it names no token: a worker would refuse every batch with it, and the neighbours in that batch."""
        highest = max(token_ids, default=0)
        return highest if highest >= self._model.vocab_size else None

    def _counts(self, request_id: bytes, subscriber: int) -> bool:
        """Whether what a subscriber says still counts: nobody with a higher number has come."""
        sequence = self.scheduler.request(request_id)
        return sequence is not None and subscriber >= sequence.subscriber

    def _claim(self, session: GatewaySession, request_id: bytes, subscriber: int, received_len: int) -> None:
        """The highest subscriber number wins; whoever loses is told."""
        match self._streams.claim(session, request_id, subscriber, received_len):
            case TakenOver() as lost:
                session.post(lost)
            case Claimed(replaced) if replaced is not None:
                replaced.session.post(TakenOver(request_id, replaced.subscriber))

    def _read_output(self, request_id: bytes, offset: int) -> tuple[int, ...]:
        sequence = self.scheduler.request(request_id)
        assert sequence is not None, "only a known request has something due"
        return sequence.output_token_ids(offset)

    def _settle(self, step: WorkerStep | None) -> None:
        for address, send in self._senders.items():
            while (batch := self.scheduler.schedule(address, self._clock())) is not None:
                send(batch)
        changes = self.scheduler.take_changes()
        if changes is not None:
            record = self._journal.add(changes, self._clock(), step)
            self._streams.add(record, self._clock())
            self._wake_journal()
        self._release()

    def _release(self) -> None:
        self._streams.release(self._journal.acked, self.is_durable)
        for session in self._streams.due_sessions:
            session.wake()
