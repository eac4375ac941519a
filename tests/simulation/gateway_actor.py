"""A gateway as a process: the real session, its real streams and rules, between simulated links and simulated calls."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import services.gateway.session as real_session
from gateway.output_stream import OutputStream, Shown
from services.gateway.config import GatewayConfig
from services.gateway.request_stream import RequestStream
from services.gateway.scheduler_link import SessionBroken, StreamEnd
from services.rpc.errors import ServiceError
from tessera.values.identity import Epoch
from tessera.values.request import RequestOutput
from tessera.values.session import GatewayMessage, Heartbeat, HelloAck, Invite, SchedulerMessage, Standby
from tests.simulation.store_actor import run_now
from tests.simulation.workload import Ask, SimTokenizer
from tests.simulation.world import Actor, End, Violation, World

HEARTBEAT_MS = 250
HEARTBEAT = 1000 * HEARTBEAT_MS
SILENT_HEARTBEATS_MAX = 3
RETRY_MIN, RETRY_MAX = 50_000, 1_000_000
LEADER_WAIT = 5_000_000
LEADER_POLL = 20_000
FLUSH = 50_000


class SimLink:
    """What a session knows of one scheduler; opens a stream to it again and again."""

    def __init__(self, owner: "SimGateway", scheduler: str) -> None:
        self.address = scheduler
        self._owner = owner
        self._end: End | None = None
        self._heard_at = 0
        self._retry = RETRY_MIN
        self._was_of_use = False
        owner.later(owner.world.rng.randrange(1000), self._open)

    def say(self, message: GatewayMessage) -> None:
        if self._end is not None:
            self._end.send(message)

    def reopen(self) -> None:
        end = self._end
        self._owner.later(0, lambda: self._over(end, "given up here"))

    def _open(self) -> None:
        owner = self._owner
        self._end = end = owner.world.connect(owner, owner.world.actors[self.address], "session")
        if end is None:
            owner.later(RETRY_MIN, self._open)
            return
        self._heard_at, self._was_of_use = owner.world.now, False
        end.on_message = lambda message: self._hear(end, *message)
        end.on_close = lambda: self._over(end, "the scheduler closed the stream")
        owner.later(HEARTBEAT, lambda: self._beat(end))

    def _beat(self, end: End) -> None:
        if end is not self._end:
            return
        if self._owner.world.now - self._heard_at > SILENT_HEARTBEATS_MAX * HEARTBEAT:
            self._over(end, "silent")
            return
        end.send(Heartbeat())
        self._owner.later(HEARTBEAT, lambda: self._beat(end))

    def _hear(self, end: End, epoch: Epoch, message: SchedulerMessage) -> None:
        if end is not self._end:
            return
        self._heard_at = self._owner.world.now
        self._was_of_use = self._was_of_use or not isinstance(message, Invite | Heartbeat)
        session: Any = self._owner.session
        try:
            match message:
                case Invite(protocol):
                    session.invited(self, epoch, protocol)
                case Standby():
                    session.stands_by(self)
                case _:
                    session.heard(self, epoch, message)
        except SessionBroken as broken:
            self._over(end, str(broken))
        self._owner.check_origin(self.address, epoch, message)
        self._owner.serve_calls()

    def _over(self, end: End | None, why: str) -> None:
        if end is None or end is not self._end:
            return
        end.close()
        self._end = None
        session: Any = self._owner.session
        session.ended(self, StreamEnd(why))
        self._owner.serve_calls()
        self._retry = RETRY_MIN if self._was_of_use else min(2 * self._retry, RETRY_MAX)
        self._owner.later(self._retry, self._open)


@dataclass(frozen=True)
class Resume:
    """What a client that comes back says of the answer so far; without `token_ids` it has not kept them."""

    number: int
    token_offset: int
    text_offset: int
    token_ids: tuple[int, ...]


class SimGateway(Actor):
    """Calls are streams of their clients; the session is the real one."""

    def __init__(self, world: World, name: str, schedulers: list[str], detach_grace_ms: int) -> None:
        super().__init__(world, name)
        self._schedulers = schedulers
        self._config = GatewayConfig(
            scheduler=tuple(f"{scheduler}:1" for scheduler in schedulers),
            model="simulated",
            heartbeat_ms=HEARTBEAT_MS,
            detach_grace_ms=detach_grace_ms,
        )
        self.start()

    def start(self) -> None:
        self._stands = False
        self._answered_epoch = 0
        self.calls: dict[End, RequestStream] = {}
        self.session = real_session.SchedulerSession(self._config, SimTokenizer(), self._standing)  # type: ignore[arg-type]
        self.session._present = frozenset(self._schedulers)
        self._really_take_output = self.session._take_output
        self.session._take_output = self._take_output  # type: ignore[method-assign]
        self._num_taken = 0
        for scheduler in self._schedulers:
            SimLink(self, scheduler)
        self.later(HEARTBEAT // 4, self._watch)

    @property
    def num_live(self) -> int:
        """Requests that a scheduler may still send something for."""
        return len(self.session.live)

    def _take_output(self, output: RequestOutput) -> None:
        self._num_taken += 1
        self._really_take_output(output)

    def check_origin(self, scheduler: str, epoch: Epoch, message: SchedulerMessage) -> None:
        """Nothing that a leader says counts once a later one has answered here."""
        if isinstance(message, HelloAck):
            if epoch.number < self._answered_epoch and self._stands:
                raise Violation(f"{self.name} follows epoch {epoch.number} after {self._answered_epoch}")
            self._answered_epoch = max(self._answered_epoch, epoch.number)
        elif self._num_taken and epoch.number < self._answered_epoch:
            raise Violation(f"{self.name} takes a frame of epoch {epoch.number} from {scheduler} after {self._answered_epoch}")
        self._num_taken = 0

    def lives_on(self, end: End) -> bool:
        """Whether this process serves `end` to its end, and cannot take a pause of its own for the client's leaving."""
        recently = self.world.now - 700_000  # well within the time that a session takes to settle
        return self.incarnation == end.incarnation and not self.is_down and self.long_pause_until < recently

    def _standing(self, stands: bool) -> None:
        self.log("has a leader" if stands else "has lost its leader")
        self._stands = stands

    def _watch(self) -> None:
        self.session._was_paused()
        self.later(HEARTBEAT // 4, self._watch)

    def drain(self, down: int) -> None:
        """SIGTERM, and no time for what runs: its clients go on elsewhere. Back after `down`."""
        self.log("DRAINS, away for", down)
        self.session.drain()
        self.session.end_some(len(self.session.live))
        self.serve_calls()
        self.later(FLUSH, lambda: self.crash(down))

    # -- calls

    def accepted(self, end: End) -> None:
        end.on_message = lambda message: self._hear(end, *message)

    def _hear(self, end: End, kind: str, ask: Ask | None, resume: Resume | None) -> None:
        if kind == "ping":
            end.send("pong")
        elif kind == "abort":
            assert ask is not None
            for stream in self.session.live.of_client("someone", ask.client_request_id):
                self.session.abort(stream)
            self.serve_calls()
        elif kind == "cancel":
            end.close()
            self._left(end)
        else:
            assert ask is not None
            end.on_close = lambda: self._left(end)
            self._start(end, ask, resume, self.world.now + LEADER_WAIT)

    def _start(self, end: End, ask: Ask, resume: Resume | None, deadline: int) -> None:
        """Wait for a leader, then submit."""
        if not end.is_open:
            return
        if self.session._draining:
            self._refuse(end, "DRAINING", "")
            return
        if not self._stands:
            if self.world.now > deadline:
                self._refuse(end, "NO_SCHEDULER", "")
            else:
                self.later(LEADER_POLL, lambda: self._start(end, ask, resume, deadline))
            return
        resume = resume or Resume(0, 0, 0, ())
        submission = ask.submission(self.world.rng.randbytes(16))
        shown = Shown(resume.token_offset, resume.text_offset, resume.token_ids)
        output = OutputStream(SimTokenizer(), ask.detokenize, resume.number, shown)  # type: ignore[arg-type]
        stream = RequestStream(submission, output, "prompt")
        self.log(
            "is asked", ask.client_request_id, "as", submission.request_id.hex()[:4], "resume", resume.number,
            "at", resume.token_offset, "with" if resume.token_ids else "without", "ids",
        )  # fmt: skip
        self.calls[end] = stream
        self.session.submit(stream)
        self.serve_calls()

    def _left(self, end: End) -> None:
        stream = self.calls.pop(end, None)
        if stream is not None:
            self.session.leave(stream)
            self.log("was left by the client of", stream.request_id.hex()[:4], "and says", type(stream.farewell).__name__)

    def serve_calls(self) -> None:
        """Give every client what has come for it."""
        for end, stream in list(self.calls.items()):
            while end in self.calls and stream._changed.is_set():
                try:
                    delta = run_now(stream.next_delta())
                except ServiceError as error:
                    self._refuse(end, error.reason, error.message)
                    break
                end.send(delta)
                if delta.finish is not None:
                    self._over(end)

    def _refuse(self, end: End, reason: str, message: str) -> None:
        end.send(Refusal(reason, message))
        self._over(end)

    def _over(self, end: End) -> None:
        stream = self.calls.pop(end, None)
        if stream is not None:
            self.session.leave(stream)
        end.close()


@dataclass(frozen=True)
class Refusal:
    """A call ends with an error."""

    reason: str
    message: str

    @property
    def is_retriable(self) -> bool:
        """Whether the client may simply come again."""
        return self.reason in ("NO_SCHEDULER", "DRAINING", "OVERLOADED")


@contextlib.contextmanager
def session_clock(world: World) -> Iterator[None]:
    """While the body runs, sessions see the world's time."""
    real: Callable[[], float] = real_session._now_s
    real_session._now_s = lambda: world.now / 1e6
    try:
        yield
    finally:
        real_session._now_s = real
