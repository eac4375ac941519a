"""A scheduler as a process: the real rules of lease, join and leading, in a shell without sockets.

It does what the real shell does, in the same order: look, ask the workers' epochs, take the epoch, invite, attach, read, hear the
gateways, join, lead; renew; after a pause say and hear nothing until the epoch is confirmed; deposed, stand by again.
"""

from collections.abc import Callable
from typing import Any

from services.scheduler.core.journal_call import Failed, OlderEpoch
from services.scheduler.core.lease import LeaseHold, LeaseWatch, next_epoch
from services.scheduler.core.record import StoredState
from services.scheduler.core.recovered import Recovered
from services.scheduler.core.recovery import GatewayClaim, join
from services.scheduler.core.stop_rules import StopRules
from services.scheduler.core.worker_loss import WorkerLoss
from services.scheduler.leader import Leader
from services.scheduler.store.port import EpochTaken, LeaseView, Renewed, StoredJournal
from tessera.values.batch import ScheduledBatch, ScheduledBatchOutput
from tessera.values.config import Config
from tessera.values.finish import Finish
from tessera.values.identity import NO_EPOCH, Epoch
from tessera.values.report import WorkerReport
from tessera.values.request import Submission
from tessera.values.session import (
    Abort,
    Detach,
    Frame,
    GatewayMessage,
    Heartbeat,
    Hello,
    Invite,
    SchedulerMessage,
    Standby,
    StopFound,
    Submit,
)
from tests.simulation.oracle import Oracle
from tests.simulation.store_line import StoreLine
from tests.simulation.worker_line import WorkerLine
from tests.simulation.world import Actor, End, World

LEASE_MS = 2000
LEASE = 1000 * LEASE_MS
POLL = 100_000
DESCRIBE_WAIT = 500_000
HELLO_WAIT = 800_000
REPORT_WAIT = 1_000_000
TICK = 50_000
HEARTBEAT = 500_000
SESSION_SILENCE = 5_000_000
STORE_RETRY = 200_000
CHECK_EVERY = 8
"""After every so many events of a leader its parts are compared with each other."""


class SimSession:
    """What a leader knows of a gateway's stream."""

    def __init__(self, owner: "SimScheduler", end: End) -> None:
        self.end = end
        self.heard_at = owner.world.now
        self.gateway_id = b""
        self.is_greeted = False
        self._owner = owner
        self._posted: list[Any] = []
        self._is_woken = False

    def post(self, message: Any) -> None:
        self._posted.append(message)
        self.wake()

    def wake(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            self._owner.later(0, self._flush)

    def close(self) -> None:
        self.end.close()

    def _flush(self) -> None:
        self._is_woken = False
        self._owner.flush(self, self._posted)


class Term:
    """One epoch of one scheduler. It can be over at any moment: whoever comes back later asks `is_over`."""

    def __init__(self, epoch: Epoch, asked_at: int) -> None:
        self.epoch = epoch
        self.hold = LeaseHold(LEASE, asked_at)
        self.began_at = asked_at
        self.is_over = False
        self.lines: dict[str, WorkerLine] = {}
        self.reports: dict[str, WorkerReport] = {}
        self.hellos: dict[SimSession, Hello] = {}
        self.stored: StoredState | None = None
        self.read_at = 0
        self.leader: Leader | None = None
        self.deferred: list[Callable[[], None]] = []
        self.num_events = 0


class SimScheduler(Actor):
    """Lives as long as its process; `told` is the highest epoch number that it has been told of."""

    def __init__(self, world: World, name: str, workers: list[str], config: Config, oracle: Oracle) -> None:
        super().__init__(world, name)
        self._workers, self._config, self._oracle = workers, config, oracle
        self.start()

    def start(self) -> None:
        self.term: Term | None = None
        self._told = 0
        self._sessions: dict[End, SimSession] = {}
        self._watch = LeaseWatch(LEASE)
        self._lease_line = StoreLine(self, "lease")
        self._journal_line = StoreLine(self, "journal")
        self.later(self.world.rng.randrange(POLL), self._look)
        self.later(HEARTBEAT, self._beat)

    # -- standing by

    def _look(self) -> None:
        if self.term is None:
            self._lease_line.call("look", (), self._looked)

    def _looked(self, view: Any) -> None:
        if not isinstance(view, LeaseView):
            self._watch.missed()
        elif self._watch.saw(self.world.now, view.epoch, view.is_held, view.is_empty):
            self._ask_workers(view.epoch)
            return
        self.later(POLL, self._look)

    def _ask_workers(self, stored: Epoch) -> None:
        """Their epochs, as far as they answer in time."""
        held: list[Epoch] = []
        waiting: set[str] = set()
        done: list[bool] = []

        def go_on() -> None:
            if not done:
                done.append(True)
                self._take(stored, tuple(held))

        for worker in self._workers:
            end = self.world.connect(self, self.world.actors[worker], "describe")
            if end is None:
                continue
            waiting.add(worker)

            def answered(epoch: Epoch | None, worker: str = worker, end: End = end) -> None:
                end.close()
                if epoch is not None:
                    held.append(epoch)
                waiting.discard(worker)
                if not waiting:
                    go_on()

            end.on_message = answered
            end.on_close = lambda answered=answered: answered(None)
            end.send(())
        self.later(DESCRIBE_WAIT if waiting else 0, go_on)

    def _take(self, stored: Epoch, held: tuple[Epoch, ...]) -> None:
        epoch = next_epoch(stored, self._told, held, self.world.rng.randbytes(16))
        asked_at = self.world.now
        self._lease_line.call("take_epoch", (stored, epoch, LEASE_MS), lambda reply: self._took(epoch, asked_at, reply))

    def _took(self, epoch: Epoch, asked_at: int, reply: Any) -> None:
        if isinstance(reply, EpochTaken):
            self._begin(Term(epoch, asked_at))
        else:
            self.later(POLL, self._look)

    # -- a term

    def _begin(self, term: Term) -> None:
        self.log("TAKES epoch", term.epoch.number)
        self._oracle.num_takeovers += 1
        self.term = term
        for session in self._sessions.values():
            self._say(session, Invite())
        for worker in self._workers:
            term.lines[worker] = WorkerLine(self, self, worker, term.epoch)
        self.later(LEASE // 4, lambda: self._renew(term))
        self._prepare(term)

    def _renew(self, term: Term) -> None:
        if term.is_over:
            return
        if self._lease_line.is_busy:
            self.later(LEASE // 40, lambda: self._renew(term))
            return
        term.hold.may_speak(self.world.now)
        asked_at = self.world.now
        self._lease_line.call("renew", (term.epoch, LEASE_MS), lambda reply: self._renewed(term, asked_at, reply))

    def _renewed(self, term: Term, asked_at: int, reply: Any) -> None:
        if term.is_over:
            return
        if isinstance(reply, OlderEpoch):
            self.told_older(reply.epoch)
            return
        if isinstance(reply, Renewed):
            self._confirmed(term, asked_at)
        is_doubted = not term.hold.may_speak(self.world.now)
        wait = LEASE // 40 if is_doubted or isinstance(reply, Failed) else LEASE // 4
        self.later(wait, lambda: self._renew(term))

    def _confirmed(self, term: Term, asked_at: int) -> None:
        term.hold.confirmed(asked_at)
        while term.deferred and not term.is_over and term.hold.may_speak(self.world.now):
            term.deferred.pop(0)()

    def _gated(self, event: Callable[[], None]) -> None:
        """Do what happens to this term; after a pause only once its epoch is confirmed."""
        term = self.term
        assert term is not None
        if term.deferred or not term.hold.may_speak(self.world.now):
            if not term.deferred:
                self._confirm(term)
            term.deferred.append(event)
            return
        event()
        leader = self.term.leader if self.term is not None else None
        if leader is not None:
            term.num_events += 1
            if term.num_events % CHECK_EVERY == 0:
                leader.scheduler.check_integrity()

    def _confirm(self, term: Term) -> None:
        """Ask everybody who would know of a later epoch."""
        self.log("was paused, and waits for a confirmation")
        if not self._lease_line.is_busy:
            asked_at = self.world.now
            self._lease_line.call("renew", (term.epoch, LEASE_MS), lambda reply: self._renewed(term, asked_at, reply))
        asked_at = self.world.now
        for worker in self._workers:
            end = self.world.connect(self, self.world.actors[worker], "describe")
            if end is not None:
                end.on_message = lambda epoch, end=end: self._described(term, asked_at, end, epoch)
                end.send(())

    def _described(self, term: Term, asked_at: int, end: End, epoch: Epoch) -> None:
        end.close()
        if term.is_over:
            return
        if epoch == term.epoch:
            self._confirmed(term, asked_at)
        elif not term.epoch.supersedes(epoch):
            self.told_older(epoch)

    def told_older(self, epoch: Epoch) -> None:
        """Somebody knows a later leader."""
        self._stand_by(epoch.number, f"was told of epoch {epoch.number}")

    def _stand_by(self, told: int, why: str) -> None:
        term, self.term = self.term, None
        if term is None:
            return
        self.log("STANDS BY:", why)
        term.is_over = True
        self._told = max(self._told, told)
        for line in term.lines.values():
            line.close()
        for session in list(self._sessions.values()):
            session.close()
        self._sessions.clear()
        self._journal_line.close()
        self._lease_line.close()
        self._watch = LeaseWatch(LEASE, mine=term.epoch)
        self.later(POLL, self._look)

    # -- from the epoch to the join

    def _prepare(self, term: Term) -> None:
        """Wait for reports, then read, then wait for Hellos, then join; looked at again every few milliseconds."""
        if term.is_over or term.leader is not None:
            return
        self.later(10_000, lambda: self._prepare(term))
        now = self.world.now
        waited = now - term.began_at
        if not term.hold.may_speak(now) or not term.reports:
            return
        if term.stored is None:
            is_time = len(term.reports) == len(self._workers) or waited >= REPORT_WAIT
            if is_time and now >= term.read_at and not self._journal_line.is_busy:
                self._journal_line.call("read", (term.epoch,), lambda reply: self._read(term, reply))
            return
        live = {request_id for request_id, request in term.stored.requests.items() if request.finish is None}
        live |= {slot.request_id for report in term.reports.values() for slot in report.slots}
        claimed = {claim.request_id for hello in term.hellos.values() for claim in hello.live}
        if live <= claimed or now - term.read_at >= HELLO_WAIT:
            self._join(term, term.stored)

    def _read(self, term: Term, reply: Any) -> None:
        if term.is_over:
            return
        if isinstance(reply, StoredJournal):
            term.stored, term.read_at = reply.state, self.world.now
        elif isinstance(reply, OlderEpoch):
            self.told_older(reply.epoch)
        else:
            term.read_at = self.world.now + STORE_RETRY

    def _join(self, term: Term, stored: StoredState) -> None:
        description = next(iter(term.reports.values())).description
        pool_len_max = min(report.description.geometry.num_tokens for report in term.reports.values()) + 1

        def first_stop(submission: Submission, output: tuple[int, ...]) -> Finish | None:
            tokens = [*submission.prompt_token_ids.tolist(), *output]
            return StopRules.of(submission, description.model, pool_len_max).first_stop(tokens, 0)

        claims = [
            GatewayClaim(live.request_id, live.subscriber, live.token_ids)
            for hello in term.hellos.values()
            for live in hello.live
        ]
        recovered = join(stored, term.reports, claims, first_stop)
        self.log(
            "JOINS at record", recovered.last_record,
            [
                (request.submission.request_id.hex()[:4], len(request.output_token_ids), request.attempt,
                 request.adoption and (request.adoption.worker, request.adoption.slot.slot), request.finish and request.finish.label)
                for request in recovered.requests
            ],
            "orphans", [(orphan.worker, orphan.slot.slot) for orphan in recovered.orphans],
        )  # fmt: skip
        leader = Leader(self._config, term.epoch, description.model, self._wake_journal, lambda: self.world.now)
        term.leader = leader
        restore = leader.scheduler.restore

        def restore_and_check(recovered: Recovered, reports: dict[str, WorkerReport], now_us: int) -> None:
            restore(recovered, reports, now_us)
            self._oracle.joined(leader.scheduler, reports, stored)  # before the first batch, which may preempt

        leader.scheduler.restore = restore_and_check  # type: ignore[method-assign]
        senders = {worker: self._sender(term.lines[worker]) for worker in term.reports}
        leader.lead(recovered, dict(term.reports), senders)
        leader.scheduler.check_integrity()
        assert not recovered.num_contradictions, "sources contradict each other, though everything is deterministic"
        for session in list(term.hellos):
            self._greet(session)
        self._tick(term)

    def _sender(self, line: WorkerLine) -> Callable[[ScheduledBatch], None]:
        return line.send

    # -- leading

    def _tick(self, term: Term) -> None:
        if term.is_over or term.leader is None:
            return
        self.later(TICK, lambda: self._tick(term))
        if not term.deferred:
            self._gated(term.leader.tick)
        self._wake_journal()

    def _wake_journal(self) -> None:
        self.later(0, self._pump)

    def _pump(self) -> None:
        term = self.term
        if term is None or term.leader is None or self._journal_line.is_busy or term.deferred:
            return
        if not term.hold.may_speak(self.world.now):
            return
        call = term.leader.next_journal_call()
        if call is not None:
            self._journal_line.call("call", (term.epoch, call), lambda reply: self._journalled(term, reply))

    def _journalled(self, term: Term, reply: Any) -> None:
        if term.is_over or term.leader is None:
            return
        leader = term.leader

        def apply() -> None:
            leader.journal_replied(reply)
            if leader.superseded is not None:
                self.told_older(leader.superseded)
            else:
                self._wake_journal()

        self._gated(apply)

    def worker_attached(self, line: WorkerLine, report: WorkerReport) -> None:
        """See `Listener`."""
        term = self.term
        assert term is not None
        term.reports[line.worker] = report
        leader = term.leader
        if leader is not None:
            self._gated(lambda: leader.worker_attached(line.worker, report, self._sender(line)))

    def worker_output(self, line: WorkerLine, output: ScheduledBatchOutput) -> None:
        """See `Listener`."""
        assert self.term is not None and self.term.leader is not None
        leader = self.term.leader
        self._gated(lambda: leader.worker_output(line.worker, output))

    def worker_detached(self, line: WorkerLine, loss: WorkerLoss) -> None:
        """See `Listener`."""
        if self.term is None:
            return
        self.term.reports.pop(line.worker, None)
        leader = self.term.leader
        if leader is not None:
            self._gated(lambda: leader.worker_detached(line.worker, loss))

    # -- sessions

    def accepted(self, end: End) -> None:
        session = self._sessions[end] = SimSession(self, end)
        end.on_message = lambda message: self._hear(session, message)
        end.on_close = lambda: self._closed(session)
        self._say(session, Standby() if self.term is None else Invite())

    def _say(self, session: SimSession, message: SchedulerMessage) -> None:
        session.end.send((NO_EPOCH if self.term is None else self.term.epoch, message))

    def _beat(self) -> None:
        for session in list(self._sessions.values()):
            if self.world.now - session.heard_at > SESSION_SILENCE:
                session.close()
                self._closed(session)
            else:
                self._say(session, Standby() if self.term is None else Heartbeat())
        self.later(HEARTBEAT, self._beat)

    def _closed(self, session: SimSession) -> None:
        self._sessions.pop(session.end, None)
        term = self.term
        if term is None:
            return
        term.hellos.pop(session, None)
        leader = term.leader
        if leader is not None:
            self._gated(lambda: leader.session_closed(session))  # type: ignore[arg-type]

    def _hear(self, session: SimSession, message: GatewayMessage) -> None:
        session.heard_at = self.world.now
        term = self.term
        if term is None or isinstance(message, Heartbeat):
            return
        if isinstance(message, Hello):
            if not term.epoch.supersedes(message.highest_epoch):
                self._stand_by(message.highest_epoch.number, "a gateway has seen a later epoch")
                return
            term.hellos[session] = message
            if term.leader is not None:
                self._greet(session)
            return
        leader = term.leader
        assert leader is not None and isinstance(message, Submit | Abort | Detach | StopFound)
        self._gated(lambda: leader.heard(session, message))  # type: ignore[arg-type]

    def _greet(self, session: SimSession) -> None:
        """Answer a Hello, once the epoch was confirmed within the last lease time."""
        term = self.term
        if term is None or term.leader is None or session not in term.hellos:
            return
        if not term.hold.may_greet(self.world.now):
            self.later(LEASE // 40, lambda: self._greet(session))
            return
        leader = term.leader

        def greet() -> None:
            hello = term.hellos.pop(session, None)
            if hello is not None and session.end.is_open:
                ack = leader.session_opened(session, hello)  # type: ignore[arg-type]
                session.is_greeted = True
                self._say(session, ack)
                session.wake()

        self._gated(greet)

    def flush(self, session: SimSession, posted: list[Any]) -> None:
        """Say what is due to a gateway."""
        term = self.term
        if term is None or term.leader is None or not session.end.is_open or not session.is_greeted:
            return
        if term.deferred or not term.hold.may_speak(self.world.now):
            self.later(LEASE // 40, session.wake)
            return
        due = posted[:]
        posted.clear()
        for message in due:
            self._say(session, message)
        outputs = term.leader.take_frame(session)  # type: ignore[arg-type]
        if outputs:
            self._say(session, Frame(tuple(outputs)))
