"""One term of leadership as a process: ask, take the epoch, attach, read, hear the gateways, join, lead.

The order is that of recovery: workers are asked for their epochs, the epoch is taken in Redis, then they are attached, and only then is
Redis read, so that nobody of an earlier term can change what was read.
"""

import asyncio
import contextlib
from collections.abc import Callable

import structlog

from services.rpc.addresses import addresses
from services.rpc.errors import FieldViolation, InvalidArgument, Unavailable
from services.scheduler.clock import now_us
from services.scheduler.config import SchedulerConfig
from services.scheduler.core.journal_call import Failed, JournalCall, JournalReply, OlderEpoch
from services.scheduler.core.record import StoredState
from services.scheduler.core.recovered import Recovered
from services.scheduler.core.recovery import GatewayClaim, join
from services.scheduler.core.stop_rules import StopRules
from services.scheduler.core.worker_loss import WorkerLoss
from services.scheduler.journal_pump import JournalPump
from services.scheduler.leader import Leader
from services.scheduler.sessions import GatewaySession, Said
from services.scheduler.store.port import EpochMoved, LeaseView, Store, WrongFormat
from services.scheduler.worker_link import OlderEpoch as WorkerHasOlderEpoch
from services.scheduler.worker_link import ask_epochs
from services.scheduler.worker_links import WorkerLinks
from tessera.values.batch import ScheduledBatch, ScheduledBatchOutput
from tessera.values.finish import Finish
from tessera.values.identity import Epoch, new_instance_id
from tessera.values.model import ModelInfo
from tessera.values.report import WorkerReport
from tessera.values.request import RequestOutput, Submission
from tessera.values.session import Hello, HelloAck

_log = structlog.get_logger()

EPOCH_LEAP_MAX = 1_000_000
"""How far above this term's a gateway's epoch may be to be believed: a number near the type's end would leave none to take."""

STORE_RETRY_S = 0.2
ASK_S = 0.5  # for workers to say their epochs
TICK_S = 0.02
LEASE_MS = 2000


class Deposed(Exception):
    """Another scheduler has taken a later epoch; this one has nothing more to say."""

    @classmethod
    def by(cls, newer: Epoch) -> "Deposed":
        """Deposed by whoever took `newer`."""
        return cls(f"another scheduler of this group has taken over: epoch {newer.number} was taken")


class GatewayAhead(Exception):
    """A gateway has seen epoch `number`, which Redis and the workers have lost: a new term has to begin above it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"a gateway has seen epoch {number}")
        self.number = number


class Term:
    """Desk of the sessions, listener of the worker links and owner of the journal for one epoch, above epoch number `told`."""

    def __init__(self, config: SchedulerConfig, store: Store, told: int = 0) -> None:
        self._config = config
        self._store = store
        self._told = told
        self._epoch: Epoch | None = None
        self._leader: Leader | None = None
        self._leads = asyncio.Event()
        self._expected: frozenset[str] = frozenset()  # workers that answered when they were asked for their epochs
        self._reports: dict[str, WorkerReport] = {}
        self._senders: dict[str, Callable[[ScheduledBatch], None]] = {}
        self._reported = asyncio.Event()
        self._hellos: dict[GatewaySession, Hello] = {}
        self._hello_came = asyncio.Event()
        self._over: asyncio.Future[Deposed | GatewayAhead] = asyncio.get_running_loop().create_future()
        self._pump: JournalPump | None = None

    async def run(self, serving: Callable[[bool], None], invite: Callable[["Term"], None]) -> None:
        """Begin the term and lead until somebody else does. `serving` is told when gateways are answered, `invite` when they may be
        invited. Raises Deposed or GatewayAhead."""
        held = await self._ask_workers()
        self._expected = frozenset(held)
        self._epoch = await self._take_epoch(max(self._told, *(epoch.number for epoch in held.values())))
        invite(self)
        try:
            await self._lead(serving)
        except* (Deposed, GatewayAhead) as over:
            raise over.exceptions[0] from None
        finally:
            serving(False)

    @property
    def leader(self) -> Leader | None:
        """The leader, once the join is done."""
        return self._leader if self._leads.is_set() else None

    # -- beginning

    async def _ask_workers(self) -> dict[str, Epoch]:
        """The epochs of the workers that are there, at least one."""
        while True:
            held = await ask_epochs(await anext(addresses(self._config.workers)), ASK_S)
            if held:
                return held
            await asyncio.sleep(STORE_RETRY_S)

    async def _take_epoch(self, highest: int) -> Epoch:
        while True:
            view = await self._store.look()
            if not isinstance(view, LeaseView):
                _log.warning("waiting for redis", error=view.why)
                await asyncio.sleep(STORE_RETRY_S)
                continue
            epoch = Epoch(1 + max(view.epoch.number, highest), new_instance_id())
            reply = await self._store.take_epoch(view.epoch, epoch, LEASE_MS)
            match reply:
                case Failed() | WrongFormat():
                    _log.warning("waiting for redis", error=reply.why)
                    await asyncio.sleep(STORE_RETRY_S)
                case EpochMoved():
                    continue
                case _:
                    _log.info("epoch taken", epoch=epoch.number)
                    return epoch

    async def _begin(self) -> Leader:
        assert self._epoch is not None
        started_us = now_us()
        await self._all_reported()
        stored = await self._read_store(self._epoch)
        await self._hear_gateways(stored)
        await self._all_reported()  # a worker may have gone and come back meanwhile
        self._pump = JournalPump(self._store, self._epoch, self)
        model = next(iter(self._reports.values())).description.model
        self._leader = Leader(self._config.scheduling, self._epoch, model, self._pump.wake)
        recovered = join(stored, self._reports, self._claims_on(model), self._stop_rule())
        self._leader.lead(recovered, self._reports, dict(self._senders))
        self._leads.set()
        _log.info("leading", epoch=self._epoch.number, after_ms=(now_us() - started_us) // 1000, **_counts(recovered))
        return self._leader

    async def _all_reported(self) -> None:
        """At least one worker has reported, and so have the others that were asked, unless that takes too long."""
        while not self._reports:
            self._reported.clear()
            await self._reported.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.hello_wait_ms / 1000):
                while not self._expected <= self._reports.keys():
                    self._reported.clear()
                    await self._reported.wait()

    async def _read_store(self, epoch: Epoch) -> StoredState:
        while True:
            reply = await self._store.read(epoch)
            match reply:
                case OlderEpoch(newer):
                    raise Deposed.by(newer)
                case Failed() | WrongFormat():
                    _log.warning("waiting for redis", error=reply.why)
                    await asyncio.sleep(STORE_RETRY_S)
                case _:
                    return reply.state

    async def _hear_gateways(self, stored: StoredState) -> None:
        """Give gateways time to say what they hold of requests that live, at most `hello_wait_ms`."""
        live = {request_id for request_id, request in stored.requests.items() if request.finish is None}
        live |= {slot.request_id for report in self._reports.values() for slot in report.slots}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.hello_wait_ms / 1000):
                while not live <= {claim.request_id for hello in self._hellos.values() for claim in hello.live}:
                    self._hello_came.clear()
                    await self._hello_came.wait()

    def _claims_on(self, model: ModelInfo) -> list[GatewayClaim]:
        """What gateways hold. What cannot be output of `model` is left out: `Leader.session_opened` answers it."""
        return [
            GatewayClaim(live.request_id, live.subscriber, live.token_ids)
            for hello in self._hellos.values()
            if hello.tokenizer_digest == model.tokenizer_digest
            for live in hello.live
            if max(live.token_ids, default=0) < model.vocab_size
        ]

    def _stop_rule(self) -> Callable[[Submission, tuple[int, ...]], Finish | None]:
        model = next(iter(self._reports.values())).description.model
        pool_len_max = max(report.description.geometry.num_tokens for report in self._reports.values()) + 1

        def first_stop(submission: Submission, output_token_ids: tuple[int, ...]) -> Finish | None:
            tokens = submission.prompt_token_ids.tolist() + list(output_token_ids)
            return StopRules.of(submission, model, pool_len_max).first_stop(tokens, 0)

        return first_stop

    # -- running

    async def _lead(self, serving: Callable[[bool], None]) -> None:
        """Everything under the taken epoch, side by side; ends by an ExceptionGroup or cancellation."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._run_links())
            tasks.create_task(self._watch_over())
            leader = await self._begin()
            serving(True)
            tasks.create_task(self._pump_journal())
            while True:
                await asyncio.sleep(TICK_S)
                leader.tick()

    async def _run_links(self) -> None:
        try:
            await WorkerLinks(self._config.workers, self.epoch, self, self._config.worker_silence_ms).run()
        except WorkerHasOlderEpoch as error:
            raise Deposed(str(error)) from error

    async def _pump_journal(self) -> None:
        assert self._pump is not None
        await self._pump.run()

    async def _watch_over(self) -> None:
        raise await self._over

    def _end(self, why: Deposed | GatewayAhead) -> None:
        """This term is over; the first reason counts."""
        if not self._over.done():
            self._over.set_result(why)

    # -- what worker links hear

    def worker_attached(self, address: str, report: WorkerReport, send: Callable[[ScheduledBatch], None]) -> None:
        """See `WorkerListener`."""
        _log.info("worker attached", worker=address, slots=len(report.slots), last_step=report.last_step)
        self._reports[address] = report
        self._senders[address] = send
        self._reported.set()
        if self._leader is not None:
            self._leader.worker_attached(address, report, send)

    def worker_output(self, address: str, output: ScheduledBatchOutput) -> None:
        """See `WorkerListener`."""
        assert self._leader is not None, "nothing was sent before the join"
        self._leader.worker_output(address, output)

    def worker_detached(self, address: str, loss: WorkerLoss) -> None:
        """See `WorkerListener`."""
        self._reports.pop(address, None)
        self._senders.pop(address, None)
        if self._leader is not None:
            self._leader.worker_detached(address, loss)

    def worker_removed(self, address: str) -> None:
        """See `FleetListener`."""
        if self._leader is not None:
            self._leader.worker_removed(address)

    # -- what gateways say

    @property
    def epoch(self) -> Epoch:
        """See `SessionDesk`."""
        assert self._epoch is not None, "gateways are invited after the epoch is taken"
        return self._epoch

    @property
    def may_speak(self) -> bool:
        """See `SessionDesk`."""
        return True

    async def opened(self, session: GatewaySession, hello: Hello) -> HelloAck:
        """See `SessionDesk`."""
        leap = hello.highest_epoch.number - self.epoch.number
        if leap > EPOCH_LEAP_MAX:
            text = f"{hello.highest_epoch.number} cannot have been seen: the present epoch is {self.epoch.number}"
            raise InvalidArgument((FieldViolation("hello.highest_epoch", text),))
        if not self.epoch.supersedes(hello.highest_epoch):
            self._end(GatewayAhead(hello.highest_epoch.number))
        self._hellos[session] = hello
        self._hello_came.set()
        leads = asyncio.create_task(self._leads.wait())
        try:
            await asyncio.wait((leads, self._over), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leads.cancel()
            del self._hellos[session]
        if self._over.done():
            raise Unavailable("a new term begins", reason="TERM_OVER", retry_after_ms=200)
        assert self._leader is not None
        return self._leader.session_opened(session, hello)

    def heard(self, session: GatewaySession, message: Said) -> None:
        """See `SessionDesk`."""
        assert self._leader is not None
        self._leader.heard(session, message)

    def take_frame(self, session: GatewaySession) -> list[RequestOutput]:
        """See `SessionDesk`."""
        assert self._leader is not None
        return self._leader.take_frame(session)

    def closed(self, session: GatewaySession) -> None:
        """See `SessionDesk`."""
        if self._leader is not None:
            self._leader.session_closed(session)

    # -- what the journal pump asks and hears

    def next_journal_call(self) -> JournalCall | None:
        """See `JournalOwner`."""
        assert self._leader is not None
        return self._leader.next_journal_call()

    def journal_replied(self, reply: JournalReply) -> None:
        """See `JournalOwner`."""
        assert self._leader is not None
        self._leader.journal_replied(reply)
        if self._leader.superseded is not None:
            self._end(Deposed.by(self._leader.superseded))

    def journal_wake_us(self) -> int | None:
        """See `JournalOwner`."""
        assert self._leader is not None
        return self._leader.journal_wake_us()


def _counts(recovered: Recovered) -> dict[str, int]:
    """What the log says of a join."""
    return {
        "requests": len(recovered.requests),
        "adopted": sum(request.adoption is not None for request in recovered.requests),
        "finished": sum(request.finish is not None for request in recovered.requests),
        "orphans": len(recovered.orphans),
        "cached_blocks": sum(len(worker.published) for worker in recovered.workers),
        "contradictions": recovered.num_contradictions,
    }
