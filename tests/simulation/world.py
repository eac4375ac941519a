"""Simulated time, processes and network: one thread, one heap of events, one seed.

A process (`Actor`) can crash, be paused and go on; what it has set up dies with its incarnation, what comes while it is paused waits. A
stream between two of them is in order each way; different streams overtake each other. A cut pair hears nothing of each other until it heals.
"""

import heapq
import random
from collections.abc import Callable
from typing import Any

EVENTS_MAX = 2_000_000
"""A run of more events than this has not come to rest."""

LONG_PAUSE = 600_000
RETRANSMITTED_WITHIN = 500_000
LATENCIES_SLOW = (50, 500, 5_000, 20_000, 60_000)
LATENCY_MAX, LATENCY_LONGEST = 1000, 200_000


class Violation(AssertionError):
    """The system broke a promise."""


class Actor:
    """One process. Subclasses define `start`, which is called in every incarnation, and `accepted`, for streams that others open."""

    def __init__(self, world: "World", name: str) -> None:
        self.world, self.name = world, name
        self.incarnation = 0
        self.is_down = False
        self.paused_until = 0
        self.long_pause_until = 0  # longer than LONG_PAUSE, so that the process can notice
        self.ends: dict[End, None] = {}
        self._ties: dict[object, float] = {}
        world.actors[name] = self

    def start(self) -> None:
        """Begin to live: set up all state anew."""

    def accepted(self, end: "End") -> None:
        """Somebody opened a stream to this process."""
        raise NotImplementedError(self.name)

    @property
    def is_paused(self) -> bool:
        return self.paused_until > self.world.now

    def later(self, delay: int, function: Callable[[], None], lane: object = None) -> None:
        """Call `function` in this incarnation, `delay` microseconds from now. What waited for a paused process comes in order per lane."""
        self.world.schedule(self.world.now + delay, self, lane if lane is not None else object(), function)

    def log(self, *words: object) -> None:
        self.world.log(self.name, *words)

    def crash(self, down: int) -> None:
        """kill -9; back after `down` microseconds."""
        self.log("CRASH for", down)
        self.is_down = True
        self.incarnation += 1
        self.paused_until = 0
        self._ties.clear()
        is_lost = self.world.rng.random() < 0.15  # the whole machine: nobody is told
        for end in list(self.ends):
            end.drop(is_told=not is_lost)
        self.world.schedule(self.world.now + down, None, None, self._come_up)

    def pause(self, duration: int) -> None:
        """SIGSTOP, and SIGCONT after `duration` microseconds."""
        if not self.is_down:
            self.log("PAUSE for", duration)
            if self.world.now + duration > self.paused_until:
                self.paused_until = self.world.now + duration
                self._ties.clear()
            if duration > LONG_PAUSE:
                self.long_pause_until = self.paused_until

    def tie(self, lane: object) -> float:
        """Where a lane stands among all that comes to this process at the moment it goes on."""
        return self._ties.setdefault(lane, self.world.rng.random())

    def _come_up(self) -> None:
        self.is_down = False
        self.log("UP")
        self.start()


class End:
    """One end of a stream. Its owner sets `on_message` and `on_close`; the latter is called once, unless the owner closed this end itself."""

    def __init__(self, world: "World", owner: Actor, kind: str) -> None:
        self.world, self.owner, self.kind = world, owner, kind
        self.is_open = True
        self.incarnation = owner.incarnation
        self.peer: End
        self.on_message: Callable[[Any], None] = lambda message: None
        self.on_close: Callable[[], None] = lambda: None
        self._last_due = 0
        owner.ends[self] = None

    def send(self, message: Any) -> None:
        """The peer's owner hears `message` after everything sent before; not at all where the stream ends first."""
        if self.is_open:
            self._deliver(lambda: self.peer.on_message(message) if self.peer.is_open else None)

    def close(self) -> None:
        """End the stream; what was sent is still delivered, or not, as it happens."""
        self.drop(is_told=True)

    def drop(self, is_told: bool) -> None:
        """End this end; `is_told`: the peer's owner hears of it."""
        if not self.is_open:
            return
        self.is_open = False
        self.owner.ends.pop(self, None)
        if not is_told:
            self.peer._last_due = 1 << 62  # what the peer sends from now on is lost
            return
        if self.world.rng.random() < 0.3:  # a reset overtakes what is under way
            self._last_due = 0
        self._deliver(self.peer._peer_closed)

    def break_off(self) -> None:
        """Something between the two ends it: either hears of it in its turn."""
        if self.is_open:
            self.drop(is_told=True)
            self.world.schedule(self.world.now, self.owner, self, self.on_close)

    def _peer_closed(self) -> None:
        if self.is_open:
            self.is_open = False
            self.owner.ends.pop(self, None)
            self.on_close()

    def _deliver(self, function: Callable[[], None]) -> None:
        world, receiver = self.world, self.peer.owner
        due = max(world.now + world.latency() + world.delay(self.owner, receiver), self._last_due)
        healed_at = world.healed_at(self.owner, receiver)
        if due < healed_at:  # what was stuck is tried again after a while, when others may have got through
            due = healed_at + world.rng.randrange(RETRANSMITTED_WITHIN)
        self._last_due = due
        if due < 1 << 62:
            world.schedule(due, receiver, self, function)


class World:
    """Owns clock (microseconds), randomness, processes and the transcript."""

    def __init__(self, seed: int, is_traced: bool = False) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.now = 0
        self.actors: dict[str, Actor] = {}
        self.transcript: list[str] | None = [] if is_traced else None
        self.num_events = 0
        self._is_slow = self.rng.random() < 0.4
        self._heap: list[tuple[int, float, int, Actor | None, int, object, Callable[[], None]]] = []
        self._num_scheduled = 0
        self._cuts: dict[frozenset[str], int] = {}
        self._slow: dict[frozenset[str], tuple[int, int]] = {}  # until when, and by how much

    def log(self, *words: object) -> None:
        if self.transcript is not None:
            self.transcript.append(f"{self.now / 1e6:10.6f} " + " ".join(map(str, words)))

    def latency(self) -> int:
        """One way between two processes."""
        draw = self.rng.random()
        if draw < 0.02:
            return int(draw * 50 * LATENCY_LONGEST)
        return LATENCIES_SLOW[int(draw * len(LATENCIES_SLOW))] if self._is_slow else 50 + int(draw * LATENCY_MAX)

    def schedule(self, at: int, actor: Actor | None, lane: object, function: Callable[[], None], tie: float = 0.0) -> None:
        self._num_scheduled += 1
        incarnation = actor.incarnation if actor is not None else 0
        heapq.heappush(self._heap, (at, tie, self._num_scheduled, actor, incarnation, lane, function))

    def connect(self, opener: Actor, acceptor: Actor, kind: str) -> End | None:
        """A new stream, as its opener's end; None where the other is not there or cannot be reached."""
        if acceptor.is_down or self.is_cut(opener, acceptor):
            return None
        near, far = End(self, opener, kind), End(self, acceptor, kind)
        near.peer, far.peer = far, near
        near._deliver(lambda: acceptor.accepted(far) if far.is_open else None)
        return near

    def cut(self, one: Actor, other: Actor, duration: int) -> None:
        """Nothing passes between the two for so long; streams stay open unless somebody gives them up."""
        self.log("CUT", one.name, other.name, "for", duration)
        pair = frozenset((one.name, other.name))
        self._cuts[pair] = max(self._cuts.get(pair, 0), self.now + duration)

    def slow_down(self, one: Actor, other: Actor, duration: int) -> None:
        """What the two say to each other takes much longer than usual."""
        by = self.rng.randrange(100_000, 600_000)
        self.log("SLOW", one.name, other.name, "for", duration, "by", by)
        self._slow[frozenset((one.name, other.name))] = (self.now + duration, by)

    def delay(self, one: Actor, other: Actor) -> int:
        if not self._slow:
            return 0
        until, by = self._slow.get(frozenset((one.name, other.name)), (0, 0))
        return by if until > self.now else 0

    def healed_at(self, one: Actor, other: Actor) -> int:
        return self._cuts.get(frozenset((one.name, other.name)), 0)

    def is_cut(self, one: Actor, other: Actor) -> bool:
        return self.healed_at(one, other) > self.now

    def run(self, is_over: Callable[[], bool], look_every: int) -> None:
        """Handle events until `is_over`, which is asked from time to time."""
        looked_at = self.now
        while self._heap:
            at, _, number, actor, incarnation, lane, function = heapq.heappop(self._heap)
            self.now = max(self.now, at)
            if actor is not None:
                if actor.incarnation != incarnation or actor.is_down:
                    continue
                if actor.is_paused:
                    entry = (actor.paused_until, actor.tie(lane), number, actor, incarnation, lane, function)
                    heapq.heappush(self._heap, entry)
                    continue
            self.num_events += 1
            if self.num_events > EVENTS_MAX:
                raise Violation(f"no rest after {EVENTS_MAX} events")
            function()
            if self.now >= looked_at + look_every:
                looked_at = self.now
                if is_over():
                    return
        raise Violation("nothing is left to happen, but it is not over")
