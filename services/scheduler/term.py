"""One term of leadership, from a taken epoch to its end: invite, attach, read, hear the gateways, join, lead.

The order is that of recovery: the epoch was taken in Redis, then the workers are attached, and only then is Redis read, so that nobody
of an earlier term can change what was read.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Protocol

import structlog

from services.rpc.errors import FieldViolation, InvalidArgument, Unavailable
from services.rpc.first_failure import first_failure
from services.scheduler.clock import boot_us, now_us
from services.scheduler.collector_pause import collector_paused
from services.scheduler.config import SchedulerConfig
from services.scheduler.core.journal_call import JournalCall, JournalReply, OlderEpoch
from services.scheduler.core.lease import LeaseHold
from services.scheduler.core.record import StoredState
from services.scheduler.core.recovered import Recovered
from services.scheduler.core.worker_loss import WorkerLoss
from services.scheduler.gathering import Gathering
from services.scheduler.journal_pump import JournalPump
from services.scheduler.leader import Leader
from services.scheduler.lease_keeper import LeaseKeeper
from services.scheduler.notice import Notice
from services.scheduler.sessions import GatewaySession, Said
from services.scheduler.standby import EpochTake
from services.scheduler.store.port import Store, StoredJournal
from services.scheduler.term_end import Deposed, GatewayAhead, TermEnd
from services.scheduler.worker_link import OlderEpoch as WorkerHasOlderEpoch
from services.scheduler.worker_links import WorkerLinks
from tessera.values.batch import ScheduledBatch, ScheduledBatchOutput
from tessera.values.identity import EPOCH_LEAP_MAX, Epoch
from tessera.values.report import WorkerReport
from tessera.values.request import RequestOutput
from tessera.values.session import Hello, HelloAck

if TYPE_CHECKING:
    from services.rpc.spans import Tracing
    from services.scheduler.request_traces import RequestTraces

_log = structlog.get_logger()

STORE_RETRY_S = 0.2
TICK_S = 0.02

WORKERS_WAIT_S = 1.0
"""For reports of the workers that were there when the epoch was taken; who comes later is attached to the running leader."""

FLUSH_S = 0.3
FLUSH_POLL_S = 0.002
"""At a hand-over: for the store to acknowledge what was decided. The next leader would find the rest in workers and gateways."""


class TermHealth(Protocol):
    """Who is told how the term does."""

    def serving(self, is_serving: bool) -> None:
        """Whether gateways are answered and a worker is there."""

    def durable(self, is_durable: bool) -> None:
        """Whether the store keeps up."""


class Term:
    """Desk of the sessions, listener of the worker links, owner of the journal and of the lease, for one epoch."""

    def __init__(
        self,
        config: SchedulerConfig,
        store: Store,
        taken: EpochTake,
        health: TermHealth,
        tracing: "Tracing | None" = None,
    ) -> None:
        self.leader: Leader | None = None  # from the join on
        self._tracing = tracing
        self._config = config
        self._store = store
        self._epoch = taken.epoch
        self._expected = taken.workers
        self._health = health
        self._hold = LeaseHold(1000 * config.lease_ms, taken.asked_us)
        self._keeper = LeaseKeeper(store, taken.epoch, config.lease_ms, self._hold, self)
        self._pump = JournalPump(store, taken.epoch, self)
        self._gathering = Gathering()
        self._attached: set[str] = set()
        self._leads = asyncio.Event()
        self._confirmation = asyncio.Event()
        self._over: asyncio.Future[TermEnd] = asyncio.get_running_loop().create_future()
        self._is_durable = False
        self._has_ended = False

    async def run(self) -> None:
        """Lead until somebody else does. Raises TermEnd."""
        try:
            with first_failure(TermEnd):
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._keeper.run())
                    tasks.create_task(self._run_links())
                    tasks.create_task(self._watch_over())
                    leader = await self._begin()
                    tasks.create_task(self._pump.run())
                    tasks.create_task(self._tick(leader))
        finally:
            self._has_ended = True
            if self._traces is not None:
                self._traces.close()
            self._health.serving(False)
            self._health.durable(False)

    async def hand_over(self) -> None:
        """End gracefully: decide nothing more, let the store have what was decided, and give the lease back. What runs waits in
        workers, store and gateways for whoever leads next."""
        if self.leader is not None:
            self.leader.hand_over()
            flush_until_us = now_us() + int(1e6 * FLUSH_S)
            while not self.leader.is_written and now_us() < flush_until_us:  # noqa: ASYNC110 - a few turns at most
                await asyncio.sleep(FLUSH_POLL_S)
        await self._keeper.release()

    # -- beginning

    async def _begin(self) -> Leader:
        started_us = now_us()
        await self._gathering.hear_workers(self._expected, WORKERS_WAIT_S)
        stored = await self._read_store()
        await self._gathering.hear_gateways(stored, self._config.hello_wait_ms / 1000)
        await self._gathering.hear_workers(self._expected, 0)  # one may have gone and come back meanwhile
        reports, senders = self._gathering.reports, self._gathering.senders
        model = next(iter(reports.values())).description.model
        with collector_paused():
            recovered = self._gathering.join(stored)
            leader = Leader(
                self._config.scheduling,
                self._epoch,
                model,
                recovered.last_record,
                wake_journal=self._pump.wake,
                may_speak=lambda: self.may_speak,
            )
            leader.traces = self._new_traces(leader, recovered)
            leader.lead(recovered, reports, senders)
            if leader.traces is not None:
                leader.traces.begun()
        for address in self._gathering.leaving:
            leader.worker_leaving(address)
        self.leader = leader
        self._gathering = Gathering()
        self._leads.set()
        self._note_serving()
        _log.info("leading", epoch=self._epoch.number, after_ms=(now_us() - started_us) // 1000, **_counts(recovered))
        return leader

    def _new_traces(self, leader: Leader, recovered: Recovered) -> "RequestTraces | None":
        if self._tracing is None:
            return None
        from services.scheduler.request_traces import RequestTraces  # here: it needs OpenTelemetry

        traces = RequestTraces(self._tracing, self._epoch.number, leader.scheduler)
        traces.take_over(recovered)
        return traces

    @property
    def _traces(self) -> "RequestTraces | None":
        return self.leader.traces if self.leader is not None else None

    async def _read_store(self) -> StoredState:
        notice = Notice(_log)
        while True:
            reply = await self._store.read(self._epoch)
            match reply:
                case StoredJournal():
                    return reply.state
                case OlderEpoch(newer):
                    raise Deposed.by(newer)
                case _:
                    notice.say("waiting for redis", error=reply.why)
                    await asyncio.sleep(STORE_RETRY_S)

    # -- running

    async def _tick(self, leader: Leader) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if not self.may_speak:
                self._keeper.wake()
            leader.tick()
            self._note_durable(leader)

    async def _run_links(self) -> None:
        try:
            await WorkerLinks(self._config.workers, self._epoch, self, self._config.worker_silence_ms).run()
        except WorkerHasOlderEpoch as error:
            raise Deposed(str(error), error.number, error.worker) from error

    async def _watch_over(self) -> None:
        raise await self._over

    def _end(self, why: TermEnd) -> None:
        """This term is over; the first reason counts."""
        if not self._over.done():
            self._over.set_result(why)

    async def _unless_over(self, awaited: Awaitable[object]) -> None:
        """Wait, but not longer than the term. Raises Unavailable."""
        waiting = asyncio.ensure_future(awaited)
        try:
            await asyncio.wait((waiting, self._over), return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if self._over.done():
            raise Unavailable("a new term begins", reason="TERM_OVER", retry_after_ms=200)

    def _note_serving(self) -> None:
        self._health.serving(self.leader is not None and bool(self._attached))

    def _note_durable(self, leader: Leader) -> None:
        if leader.is_durable == self._is_durable:
            return
        self._is_durable = leader.is_durable
        self._health.durable(self._is_durable)
        if self._is_durable:
            _log.info("durable")
        else:
            _log.warning("not durable", reason=self._pump.failure or "redis is slow, or has lost what it had acknowledged")

    # -- what worker links hear

    def worker_attached(self, address: str, report: WorkerReport, send: Callable[[ScheduledBatch], None]) -> None:
        """See `WorkerListener`."""
        if self.leader is None:
            self._gathering.worker_attached(address, report, send)
        else:
            self.leader.worker_attached(address, report, send)
        _log.info("worker attached", worker=address, slots=len(report.slots), last_step=report.last_step)
        self._attached.add(address)
        self._note_serving()

    def worker_output(self, address: str, output: ScheduledBatchOutput) -> None:
        """See `WorkerListener`."""
        assert self.leader is not None, "nothing was sent before the join"
        self.leader.worker_output(address, output)

    def worker_leaving(self, address: str) -> None:
        """See `WorkerListener`."""
        if self.leader is None:
            self._gathering.worker_leaving(address)
        else:
            self.leader.worker_leaving(address)

    def worker_detached(self, address: str, loss: WorkerLoss) -> None:
        """See `WorkerListener`."""
        self._attached.discard(address)
        if self.leader is None:
            self._gathering.worker_detached(address)
        else:
            with self._traces.losing(address, loss) if self._traces is not None else nullcontext():
                self.leader.worker_detached(address, loss)
        self._note_serving()

    def worker_removed(self, address: str) -> None:
        """See `FleetListener`."""
        if self.leader is not None:
            self.leader.worker_removed(address)

    # -- what gateways say

    @property
    def epoch(self) -> Epoch:
        """See `SessionDesk`."""
        return self._epoch

    @property
    def may_speak(self) -> bool:
        """See `SessionDesk`."""
        return not self._has_ended and self._hold.may_speak(boot_us())

    async def opened(self, session: GatewaySession, hello: Hello) -> HelloAck:
        """See `SessionDesk`."""
        leap = hello.highest_epoch.number - self._epoch.number
        if leap > EPOCH_LEAP_MAX:
            text = f"{hello.highest_epoch.number} cannot have been seen: the present epoch is {self._epoch.number}"
            raise InvalidArgument((FieldViolation("hello.highest_epoch", text),))
        if not self._epoch.supersedes(hello.highest_epoch):
            self._end(GatewayAhead(hello.highest_epoch.number))
        with self._gathering.hello(session, hello):
            await self._unless_over(self._leads.wait())
        while not self._hold.may_greet(boot_us()):
            self._confirmation.clear()
            self._keeper.wake()
            await self._unless_over(self._confirmation.wait())
        assert self.leader is not None
        return self.leader.session_opened(session, hello)

    def heard(self, session: GatewaySession, message: Said) -> None:
        """See `SessionDesk`."""
        assert self.leader is not None
        self.leader.heard(session, message)

    def take_frame(self, session: GatewaySession) -> Sequence[RequestOutput]:
        """See `SessionDesk`."""
        assert self.leader is not None
        return self.leader.take_frame(session)

    def closed(self, session: GatewaySession) -> None:
        """See `SessionDesk`."""
        if self.leader is not None:
            self.leader.session_closed(session)

    # -- what the journal pump asks and hears

    def next_journal_call(self) -> JournalCall | None:
        """See `JournalOwner`."""
        assert self.leader is not None
        return self.leader.next_journal_call()

    def journal_replied(self, reply: JournalReply) -> None:
        """See `JournalOwner`."""
        assert self.leader is not None
        self.leader.journal_replied(reply)
        if self.leader.superseded is not None:
            self._end(Deposed.by(self.leader.superseded))

    def journal_wake_us(self) -> int | None:
        """See `JournalOwner`."""
        assert self.leader is not None
        return self.leader.journal_wake_us()

    # -- what the lease keeper asks and hears

    @property
    def is_stored(self) -> bool:
        """See `LeaseOwner`."""
        return self.leader is not None and self.leader.is_stored

    @property
    def attached_workers(self) -> Collection[str]:
        """See `LeaseOwner`."""
        return tuple(self._attached)

    def confirmed(self) -> None:
        """See `LeaseOwner`."""
        self._confirmation.set()
        self._pump.wake()

    def store_was_emptied(self) -> None:
        """See `LeaseOwner`."""
        assert self.leader is not None, "nothing was stored before"
        _log.warning("redis is empty: everything is written again")
        self.leader.store_was_emptied()


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
