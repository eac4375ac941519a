"""A scheduler as a process: the real rules of lease, join and leading, in a shell without sockets.

It does what the real shell does, in the same order: look, ask the workers' epochs, take the epoch, invite, attach, read, hear the
gateways, join, lead; renew; after a pause say and hear nothing until the epoch is confirmed; deposed, stand by again.
"""

from collections.abc import Callable, Iterable
from typing import Any

from services.scheduler.core.journal_call import OlderEpoch
from services.scheduler.core.lease import LeaseHold, LeaseWatch, next_epoch
from services.scheduler.core.record import StoredState
from services.scheduler.core.recovered import Recovered
from services.scheduler.core.worker_loss import WorkerLoss
from services.scheduler.gathering import Gathering
from services.scheduler.leader import Leader
from services.scheduler.store.port import EpochMoved, EpochTaken, LeaseView, Renewed, StoredJournal
from tessera.values.batch import ScheduledBatchOutput
from tessera.values.config import Config
from tessera.values.identity import NO_EPOCH, Epoch
from tessera.values.report import WorkerReport
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

LEASE_MS = 1000
LEASE = 1000 * LEASE_MS
POLL = 50_000
DESCRIBE_WAIT = 250_000
HELLO_WAIT = 400_000
REPORT_WAIT = 500_000
PREPARE = 10_000
TICK = 40_000
HEARTBEAT = 250_000
SESSION_SILENCE = 2_500_000
STORE_RETRY = 100_000
"""All times are about half of the real ones: what matters is how they compare with each other."""

FLUSH_WAIT, FLUSH_POLL = 150_000, 2_000
CHECK_EVERY = 8
"""After every so many events of a leader its parts are compared with each other."""


class SimSession:
    """What a leader knows of a gateway's stream."""

    def __init__(self, owner: "SimScheduler", end: End) -> None:
        self.end = end
        self.heard_at = owner.world.now
        self.gateway_id = b""
        self.is_greeted = False
        self.closing = False
        self._owner = owner
        self.posted: list[Any] = []
        self._is_woken = False

    def post(self, message: Any) -> None:
        self.posted.append(message)
        self.wake()

    def wake(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            self._owner.later(0, self._flush)

    def close(self) -> None:
        """End the stream, soon: the owner hears of it in its turn."""
        if not self.closing:
            self.closing = True
            self._owner.later(0, lambda: self._owner.end_session(self))

    def _flush(self) -> None:
        self._is_woken = False
        self._owner.flush(self, self.posted)


class Term:
    """One epoch of one scheduler. It can be over at any moment: whoever comes back later asks `is_over`."""

    def __init__(self, epoch: Epoch, expected: frozenset[str], asked_at: int) -> None:
        self.epoch, self.expected = epoch, expected
        self.hold = LeaseHold(LEASE, asked_at)
        self.began_at = asked_at
        self.is_over = False
        self.is_renewing = False
        self.lines: dict[str, WorkerLine] = {}
        self.attached: set[str] = set()
        self.gathering = Gathering()
        self.hellos: dict[SimSession, Hello] = {}
        self.stored: StoredState | None = None
        self.read_at = 0
        self.leader: Leader | None = None
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
            self._ask_epochs(self._workers, lambda held: self._take(view.epoch, held))
            return
        self.later(POLL, self._look)

    def _ask_epochs(self, workers: Iterable[str], then: Callable[[dict[str, Epoch]], None]) -> None:
        """What they have accepted, as far as they answer in time."""
        held: dict[str, Epoch] = {}
        ends: dict[str, End] = {}
        is_done: list[bool] = []

        def go_on() -> None:
            if not is_done:
                is_done.append(True)
                then(held)

        def answered(worker: str, epoch: Epoch | None) -> None:
            ends.pop(worker).close()
            if epoch is not None:
                held[worker] = epoch
            if not ends:
                go_on()

        for worker in workers:
            end = self.world.connect(self, self.world.actors[worker], "describe")
            if end is not None:
                ends[worker] = end
                end.on_message = lambda epoch, worker=worker: answered(worker, epoch)
                end.on_close = lambda worker=worker: answered(worker, None)
                end.send(())
        self.later(DESCRIBE_WAIT if ends else 0, go_on)

    def _take(self, stored: Epoch, held: dict[str, Epoch]) -> None:
        if not held:
            self.later(POLL, self._look)
            return
        epoch = next_epoch(stored, self._told, tuple(held.values()), self.world.rng.randbytes(16))
        self._watch.mine = epoch
        term = Term(epoch, frozenset(held), self.world.now)
        self._lease_line.call("take_epoch", (stored, epoch, LEASE_MS), lambda reply: self._took(term, reply))

    def _took(self, term: Term, reply: Any) -> None:
        if isinstance(reply, EpochTaken):
            self._begin(term)
            return
        if not isinstance(reply, EpochMoved):
            self._watch.missed()
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
        self._keep(term)
        self._prepare(term)

    def _keep(self, term: Term) -> None:
        """Renew the lease, now and for ever."""
        if term.is_over:
            return
        self._renew(term)
        self.later(LEASE // 4, lambda: self._keep(term))

    def _renew(self, term: Term) -> None:
        """Look first: what the store has lost shows before it is written again."""
        if term.is_over or term.is_renewing or self._lease_line.is_busy:
            return
        term.is_renewing = True
        asked_at = self._ask(term)
        was_stored = term.leader is not None and term.leader.is_stored

        def looked(view: Any) -> None:
            if not isinstance(view, LeaseView):
                renewed(None, view)
                return
            self._lease_line.call("renew", (term.epoch, LEASE_MS), lambda reply: renewed(view, reply))

        def renewed(view: LeaseView | None, reply: Any) -> None:
            if term.is_over:
                return
            term.is_renewing = False
            if isinstance(reply, OlderEpoch):
                self.told_older(reply.epoch)
            elif view is None or not isinstance(reply, Renewed):
                self._confirm_by_workers(term)
            else:
                if view.is_empty and was_stored and term.leader is not None:
                    term.leader.store_was_emptied()
                if view.epoch == term.epoch:
                    self._confirm(term, asked_at)
                else:
                    self.log("stores its epoch again over", view.epoch.number)
                    self._confirm_by_workers(term)

        self._lease_line.call("look", (), looked)

    def _ask(self, term: Term) -> int:
        """The present moment, at which something is asked; a pause that ended before is seen first."""
        term.hold.may_speak(self.world.now)
        return self.world.now

    def _confirm_by_workers(self, term: Term) -> None:
        asked_at = self._ask(term)

        def told(held: dict[str, Epoch]) -> None:
            if term.is_over:
                return
            for epoch in held.values():
                if not term.epoch.supersedes(epoch):
                    self.told_older(epoch)
                    return
            if term.epoch in held.values():
                self._confirm(term, asked_at)

        self._ask_epochs(sorted(term.attached), told)

    def _confirm(self, term: Term, asked_at: int) -> None:
        term.hold.confirmed(asked_at)
        for session in list(term.hellos):
            self._greet(session)
        self._wake_journal()

    def _may_speak(self, term: Term) -> bool:
        return not term.is_over and term.hold.may_speak(self.world.now)

    def _after(self, term: Term) -> None:
        """Something happened to a leader: compare its parts from time to time."""
        term.num_events += 1
        if term.leader is not None and not term.is_over and term.num_events % CHECK_EVERY == 0:
            term.leader.scheduler.check_integrity()

    def told_older(self, epoch: Epoch) -> None:
        """Somebody knows a later leader."""
        self._stand_by(epoch.number, f"was told of epoch {epoch.number}", None)

    def _stand_by(self, told: int, why: str, mine: Epoch | None) -> None:
        term, self.term = self.term, None
        if term is None:
            return
        self.log("STANDS BY:", why)
        term.is_over = True
        self._told = max(self._told, told)
        for line in term.lines.values():
            line.close()
        for session in list(self._sessions.values()):
            session.closing = True
            session.end.close()
        self._sessions.clear()
        self._journal_line.close()
        self._lease_line.close()
        self._watch = LeaseWatch(LEASE, mine)
        self.later(POLL, self._look)

    def drain(self, down: int) -> None:
        """SIGTERM: decide nothing more, let the store have what was decided, give the lease back, go; back after `down`."""
        self.log("HANDS OVER, away for", down)
        term = self.term
        if term is None or term.leader is None:
            self.crash(down)
            return
        leader, until = term.leader, self.world.now + FLUSH_WAIT
        leader.hand_over()

        def flush() -> None:
            if not term.is_over and not leader.is_written and self.world.now < until:
                self.later(FLUSH_POLL, flush)
            elif term.is_over or self._lease_line.is_busy:
                self.crash(down)
            else:
                self._lease_line.call("release", (term.epoch,), lambda reply: self.crash(down))

        flush()

    # -- from the epoch to the join

    def _prepare(self, term: Term) -> None:
        """Wait for reports, then read, then wait for Hellos, then join; looked at again every few milliseconds."""
        if term.is_over or term.leader is not None:
            return
        self.later(PREPARE, lambda: self._prepare(term))
        now, reports = self.world.now, term.gathering.reports
        if not reports:
            return
        if term.stored is None:
            is_time = term.expected <= reports.keys() or now - term.began_at >= REPORT_WAIT
            if is_time and now >= term.read_at and not self._journal_line.is_busy:
                self._journal_line.call("read", (term.epoch,), lambda reply: self._read(term, reply))
            return
        ended = {request_id for request_id, request in term.stored.requests.items() if request.finish is not None}
        in_slots = {slot.request_id for report in reports.values() for slot in report.slots}
        live = (term.stored.requests.keys() | in_slots) - ended
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
        recovered = term.gathering.join(stored)
        self.log(
            "JOINS at record", recovered.last_record,
            [
                (request.submission.request_id.hex()[:4], len(request.output_token_ids), request.attempt,
                 request.adoption and (request.adoption.worker, request.adoption.slot.slot), request.finish and request.finish.label)
                for request in recovered.requests
            ],
            "orphans", [(orphan.worker, orphan.slot.slot) for orphan in recovered.orphans],
        )  # fmt: skip
        reports, senders = term.gathering.reports, term.gathering.senders
        model = next(iter(reports.values())).description.model
        leader = Leader(
            self._config,
            term.epoch,
            model,
            recovered.last_record,
            self._wake_journal,
            lambda: self.world.now,
            lambda: self._may_speak(term),
        )
        term.leader = leader
        restore = leader.scheduler.restore

        def restore_and_check(recovered: Recovered, reports: dict[str, WorkerReport], now_us: int) -> None:
            restore(recovered, reports, now_us)
            self._oracle.joined(term.epoch, leader.scheduler, reports, stored)  # before the first batch, which may preempt

        leader.scheduler.restore = restore_and_check  # type: ignore[method-assign]
        leader.lead(recovered, reports, senders)
        leader.scheduler.check_integrity()
        assert not recovered.num_contradictions, "sources contradict each other, though everything is deterministic"
        for session in list(term.hellos):
            self._greet(session)
        self._tick(term)

    # -- leading

    def _tick(self, term: Term) -> None:
        if term.is_over or term.leader is None:
            return
        self.later(TICK, lambda: self._tick(term))
        if not self._may_speak(term):
            self._renew(term)
        term.leader.tick()
        self._after(term)
        self._wake_journal()

    def _wake_journal(self) -> None:
        self.later(0, self._pump)

    def _pump(self) -> None:
        term = self.term
        if term is None or term.leader is None or self._journal_line.is_busy:
            return
        call = term.leader.next_journal_call()
        if call is not None:
            self._journal_line.call("call", (term.epoch, call), lambda reply: self._journalled(term, reply))

    def _journalled(self, term: Term, reply: Any) -> None:
        if term.is_over or term.leader is None:
            return
        term.leader.journal_replied(reply)
        if term.leader.superseded is not None:
            self.told_older(term.leader.superseded)
        else:
            self._wake_journal()

    def worker_attached(self, line: WorkerLine, report: WorkerReport) -> None:
        """See `Listener`."""
        term = self.term
        assert term is not None
        term.attached.add(line.worker)
        if term.leader is None:
            term.gathering.worker_attached(line.worker, report, line.send)
        else:
            term.leader.worker_attached(line.worker, report, line.send)
            self._after(term)

    def worker_output(self, line: WorkerLine, output: ScheduledBatchOutput) -> None:
        """See `Listener`."""
        term = self.term
        assert term is not None and term.leader is not None
        term.leader.worker_output(line.worker, output)
        self._after(term)

    def worker_detached(self, line: WorkerLine, loss: WorkerLoss) -> None:
        """See `Listener`."""
        term = self.term
        if term is None:
            return
        term.attached.discard(line.worker)
        if term.leader is None:
            term.gathering.worker_detached(line.worker)
        else:
            term.leader.worker_detached(line.worker, loss)
            self._after(term)

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
            else:
                self._say(session, Standby() if self.term is None else Heartbeat())
        self.later(HEARTBEAT, self._beat)

    def end_session(self, session: SimSession) -> None:
        """Say what is left to say, and end the stream."""
        if session.end.is_open:
            self.flush(session, session.posted)
            session.end.close()
            self._closed(session)

    def _closed(self, session: SimSession) -> None:
        self._sessions.pop(session.end, None)
        term = self.term
        if term is None:
            return
        term.hellos.pop(session, None)
        term.gathering._hellos.pop(session, None)  # type: ignore[call-overload]
        if term.leader is not None:
            term.leader.session_closed(session)  # type: ignore[arg-type]
            self._after(term)

    def _hear(self, session: SimSession, message: GatewayMessage) -> None:
        session.heard_at = self.world.now
        term = self.term
        if term is None or isinstance(message, Heartbeat):
            return
        if isinstance(message, Hello):
            if not term.epoch.supersedes(message.highest_epoch):
                self._stand_by(message.highest_epoch.number, "a gateway has seen a later epoch", term.epoch)
                return
            session.gateway_id = message.gateway_id
            term.hellos[session] = message
            term.gathering._hellos[session] = message  # type: ignore[index]
            if term.leader is not None:
                self._greet(session)
            return
        assert term.leader is not None and isinstance(message, Submit | Abort | Detach | StopFound)
        term.leader.heard(session, message)  # type: ignore[arg-type]
        self._after(term)

    def _greet(self, session: SimSession) -> None:
        """Answer a Hello, once the epoch was confirmed within the last lease time."""
        term = self.term
        if term is None or term.leader is None:
            return
        if not term.hold.may_greet(self.world.now):
            self._renew(term)
            return
        hello = term.hellos.pop(session, None)
        if hello is not None and session.end.is_open:
            ack = term.leader.session_opened(session, hello)  # type: ignore[arg-type]
            session.is_greeted = True
            self._say(session, ack)
            session.wake()
            self._after(term)

    def flush(self, session: SimSession, posted: list[Any]) -> None:
        """Say what is due to a gateway."""
        term = self.term
        if term is None or term.leader is None or not session.end.is_open or not session.is_greeted:
            return
        if not self._may_speak(term):
            self.later(LEASE // 40, session.wake)
            return
        due = posted[:]
        posted.clear()
        for message in due:
            self._say(session, message)
        outputs = term.leader.take_frame(session)  # type: ignore[arg-type]
        if outputs:
            self._say(session, Frame(tuple(outputs)))
