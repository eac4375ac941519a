"""A gateway as a process: the rules of its sessions, and the real output stream for each call.

One stream to each scheduler; the highest epoch that has invited it is listened to, lower ones are refused; after a HelloAck everything is
said again that the leader does not know. A client's end is an Abort, or a Detach where the gateway says that clients may come back or where
it was itself paused.
"""

from dataclasses import dataclass, field, replace

from gateway.output_stream import OutputStream, Shown
from tessera.values.finish import Finish, FinishReason
from tessera.values.identity import NO_EPOCH, Epoch
from tessera.values.request import RequestOutput, Submission
from tessera.values.session import (
    Abort,
    Detach,
    Frame,
    GatewayMessage,
    Heartbeat,
    Hello,
    HelloAck,
    Invite,
    KnownAs,
    LiveRequest,
    Rejected,
    SchedulerMessage,
    Standby,
    StopFound,
    Submit,
    TakenOver,
)
from tests.services.scheduler.core.fake_worker import MODEL
from tests.simulation.workload import Ask, SimTokenizer
from tests.simulation.world import Actor, End, Violation, World

HEARTBEAT = 500_000
SILENT_HEARTBEATS_MAX = 3
RETRY = 100_000


@dataclass(eq=False)
class Link:
    """The stream to one scheduler."""

    end: End
    heard_at: int
    epoch: Epoch = NO_EPOCH
    hello: Hello | None = None
    is_leader: bool = False


@dataclass(eq=False)
class Call:
    """One client's stream of one request, as `request_id`."""

    submission: Submission
    output: OutputStream
    client: End
    request_id: bytes
    is_abort_asked: bool = False
    detach: Detach | None = None
    stop_found: StopFound | None = None

    @property
    def subscriber(self) -> int:
        return self.output.subscriber

    def submit(self) -> Submit:
        return Submit(self.submission, self.subscriber, tuple(self.output.token_ids))


@dataclass(frozen=True)
class Resume:
    """What a client that comes back says of the answer so far."""

    number: int
    text_offset: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Refusal:
    """A call ends with an error; `is_retriable`: the client may come again."""

    reason: str
    is_retriable: bool


@dataclass
class _State:
    links: dict[str, Link] = field(default_factory=dict)
    calls: dict[bytes, Call] = field(default_factory=dict)
    highest: Epoch = NO_EPOCH


class SimGateway(Actor):
    """`refuses_lower_epochs` false is a planted defect."""

    refuses_lower_epochs = True

    def __init__(self, world: World, name: str, schedulers: list[str], detach_grace_ms: int) -> None:
        super().__init__(world, name)
        self._schedulers = schedulers
        self._detach_grace_ms = detach_grace_ms
        self.start()

    def start(self) -> None:
        self.state = _State()
        self._gateway_id = self.world.rng.randbytes(16)
        self._alive_at = self.world.now
        self._was_paused_until = -1
        for name in self._schedulers:
            self.later(self.world.rng.randrange(1000), lambda name=name: self._open(name))
        self.later(HEARTBEAT, self._beat)

    @property
    def leader(self) -> Link | None:
        return next((link for link in self.state.links.values() if link.is_leader), None)

    def lives_on(self, end: End) -> bool:
        """Whether this process serves `end` to its end, and cannot take a pause of its own for the client's leaving."""
        recently = self.world.now - 2 * SILENT_HEARTBEATS_MAX * HEARTBEAT
        return self.incarnation == end.incarnation and not self.is_down and self.long_pause_until < recently

    # -- sessions

    def _open(self, name: str) -> None:
        end = self.world.connect(self, self.world.actors[name], "session")
        if end is None:
            self.later(RETRY, lambda: self._open(name))
            return
        link = self.state.links[name] = Link(end, self.world.now)
        end.on_message = lambda message: self._hear(name, link, *message)
        end.on_close = lambda: self._give_up(name, link, "closed")

    def _give_up(self, name: str, link: Link, why: str) -> None:
        if self.state.links.get(name) is not link:
            return
        if link.is_leader:
            self.log("lost its session with", name, why)
        link.is_leader = False
        link.end.close()
        del self.state.links[name]
        self.later(RETRY, lambda: self._open(name))

    def _beat(self) -> None:
        self._note_pause()
        for name, link in list(self.state.links.items()):
            if self.world.now - link.heard_at > SILENT_HEARTBEATS_MAX * HEARTBEAT:
                self._give_up(name, link, "silent")
            else:
                link.end.send(Heartbeat())
        self.later(HEARTBEAT, self._beat)

    def _note_pause(self) -> None:
        """A gap longer than a heartbeat and a half between two looks: this process did not run."""
        if self.world.now - self._alive_at > 1.5 * HEARTBEAT:
            self._was_paused_until = self.world.now + HEARTBEAT
        self._alive_at = self.world.now

    def _hear(self, name: str, link: Link, epoch: Epoch, message: SchedulerMessage) -> None:
        self._note_pause()
        link.heard_at = self.world.now
        if isinstance(message, Standby):
            return
        state = self.state
        if self.refuses_lower_epochs and not epoch.supersedes(state.highest):
            self._give_up(name, link, f"speaks for epoch {epoch.number}, {state.highest.number} was seen")
            return
        if epoch.number > state.highest.number or not self.refuses_lower_epochs:
            state.highest = max(epoch, state.highest, key=lambda held: held.number)
            for other_name, other in list(state.links.items()):
                if other is not link and other.is_leader and self.refuses_lower_epochs:
                    self._give_up(other_name, other, "another leads")
        link.epoch = epoch
        self._take(name, link, message)

    def _take(self, name: str, link: Link, message: SchedulerMessage) -> None:
        match message:
            case Invite():
                live = tuple(
                    LiveRequest(call.request_id, call.subscriber, tuple(call.output.token_ids))
                    for call in self.state.calls.values()
                )
                link.hello = Hello(self.state.highest, MODEL.tokenizer_digest, self._gateway_id, live)
                link.end.send(link.hello)
            case HelloAck():
                self.log("follows", name, "epoch", link.epoch.number, "unknown", len(message.unknown_request_ids))
                link.is_leader = True
                self._catch_up(link, message)
            case Frame(outputs) if link.is_leader:
                for output in outputs:
                    self._take_output(output)
            case Rejected(request_id, subscriber) | TakenOver(request_id, subscriber) if link.is_leader:
                call = self.state.calls.get(request_id)
                if call is not None and call.subscriber == subscriber:
                    self._end(call, _refusal_of(message))
            case KnownAs(request_id, subscriber, known_request_id) if link.is_leader:
                self._known_as(request_id, subscriber, known_request_id)
            case Heartbeat():
                pass
            case _:
                raise Violation(f"{self.name}: {message} came from {name} out of turn")

    def _catch_up(self, link: Link, ack: HelloAck) -> None:
        assert link.hello is not None
        known = {live.request_id for live in link.hello.live} - set(ack.unknown_request_ids)
        for call in list(self.state.calls.values()):
            if call.request_id not in known:
                if call.is_abort_asked or call.detach is not None:
                    self._forget(call)
                    continue
                self._say(call.submit())
            if call.is_abort_asked:
                self._say(Abort(call.request_id, call.subscriber))
            elif call.detach is not None:
                self._say(call.detach)
                self._forget(call)
            elif call.stop_found is not None:
                self._say(call.stop_found)

    def _say(self, message: GatewayMessage) -> None:
        """Without a leader nothing is queued: all is said again after the next HelloAck."""
        leader = self.leader
        if leader is not None:
            leader.end.send(message)

    def _known_as(self, request_id: bytes, subscriber: int, known_request_id: bytes) -> None:
        call = self.state.calls.get(request_id)
        if call is None or call.subscriber != subscriber:
            return
        earlier = self.state.calls.get(known_request_id)
        if earlier is not None and earlier is not call:
            self._end(earlier, Refusal("TAKEN_OVER", False))
        del self.state.calls[request_id]
        call.request_id = known_request_id
        call.submission = replace(call.submission, request_id=known_request_id)  # whoever leads next knows it so, if at all
        self.state.calls[known_request_id] = call
        if call.is_abort_asked:
            self._say(Abort(known_request_id, subscriber))

    def _take_output(self, output: RequestOutput) -> None:
        call = self.state.calls.get(output.request_id)
        if call is None or output.subscriber != call.subscriber:
            return
        held = call.output.finish
        if held is None:
            try:
                delta = call.output.feed(output)
            except Exception as error:
                raise Violation(f"{self.name}: an output of {output.request_id.hex()[:4]} does not fit: {error}") from error
            if delta is not None:
                call.client.send(delta)
                if delta.found_here:
                    finish = delta.finish
                    assert finish is not None and finish.stop_string is not None
                    found = StopFound(call.request_id, call.subscriber, finish.output_len, finish.stop_string)
                    call.stop_found = found
                    if output.finish is None:
                        self._say(found)
        if output.finish is not None:
            self._forget(call)
            call.client.close()

    # -- clients

    def accepted(self, end: End) -> None:
        end.on_message = lambda message: self._serve(end, *message)

    def _serve(self, end: End, kind: str, ask: Ask | None, resume: Resume | None) -> None:
        self._note_pause()
        if kind == "ping":
            end.send("pong")
            return
        if kind == "cancel":
            end.close()
            self._client_left(end)
            return
        assert ask is not None
        resume = resume or Resume(0, 0, ())
        for earlier in list(self.state.calls.values()):
            if earlier.submission.client_request_id == ask.client_request_id and not earlier.is_abort_asked:
                if earlier.subscriber > resume.number:
                    end.send(Refusal("TAKEN_OVER", False))
                    end.close()
                    return
                self._end(earlier, Refusal("TAKEN_OVER", False))
        submission = ask.submission(self.world.rng.randbytes(16))
        shown = Shown(len(resume.token_ids), resume.text_offset, resume.token_ids)
        output = OutputStream(SimTokenizer(), ask.detokenize, resume.number, shown)  # type: ignore[arg-type]
        call = Call(submission, output, end, submission.request_id)
        self.log(
            "is asked", ask.client_request_id, "as", call.request_id.hex()[:4], "resume", resume.number, len(resume.token_ids)
        )
        self.state.calls[call.request_id] = call
        end.on_close = lambda: self._client_left(end)
        self._say(call.submit())

    def _client_left(self, end: End) -> None:
        self._note_pause()
        call = next((call for call in self.state.calls.values() if call.client is end), None)
        if call is None or call.is_abort_asked or call.detach is not None:
            return
        if self.world.now <= self._was_paused_until or self._detach_grace_ms:
            grace_ms = None if self.world.now <= self._was_paused_until else self._detach_grace_ms
            call.detach = Detach(call.request_id, call.subscriber, grace_ms)
            self.log("detaches", call.request_id.hex()[:4], grace_ms)
            if self.leader is not None:
                self._say(call.detach)
                self._forget(call)
        else:
            call.is_abort_asked = True
            self.log("aborts", call.request_id.hex()[:4])
            self._say(Abort(call.request_id, call.subscriber))

    def _end(self, call: Call, refusal: Refusal) -> None:
        self._forget(call)
        call.client.send(refusal)
        call.client.close()

    def _forget(self, call: Call) -> None:
        if self.state.calls.get(call.request_id) is call:
            del self.state.calls[call.request_id]


def _refusal_of(message: Rejected | TakenOver) -> Refusal:
    if isinstance(message, TakenOver):
        return Refusal("TAKEN_OVER", False)
    return Refusal(f"{message.reason.value}: {message.message}", message.retry_after_ms > 0)


def end_of(finish: Finish) -> str:
    """An end for people."""
    return f"{finish.label} after {finish.output_len}" if finish.reason is not FinishReason.ABORTED else "aborted"
