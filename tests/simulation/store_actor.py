"""The store as a process: the in-memory store's rules behind streams, with the troubles that Redis has.

A call is `(number, method, arguments)`, the answer `(number, reply)`. A call whose caller has given up is carried out all the same if it
arrives.
"""

from collections import deque
from typing import Any

from services.scheduler.store.memory import MemoryStore
from tests.simulation.world import Actor, End, World

HISTORY_MAX = 30
"""States that a restart with an older file can go back to."""


class SimStore(Actor):
    """Never loses its state by itself; see the fault methods."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "store")
        self.memory = self._new()
        self._history: deque[MemoryStore] = deque(maxlen=HISTORY_MAX)

    def accepted(self, end: End) -> None:
        end.on_message = lambda call: self._carry_out(end, *call)

    def restart_empty(self, down: int) -> None:
        """It comes back without its file."""
        self.log("EMPTIED")
        self._restart_as(self._new(), down)

    def restart_older(self, down: int) -> None:
        """It comes back with a file that lacks the last writes."""
        if self._history:
            back = self.world.rng.randint(1, len(self._history))
            state = self._history[-back]
            self.log("ROLLED BACK", back, "writes, to epoch", state.epoch.number)
            self._restart_as(state.save(), down)

    def fill(self, duration: int) -> None:
        """Out of memory for so long."""
        self.log("FULL for", duration)
        self.memory.is_full = True
        self.world.schedule(self.world.now + duration, None, None, self._empty_again)

    def _new(self) -> MemoryStore:
        return MemoryStore(lambda: self.world.now / 1000)

    def _restart_as(self, memory: MemoryStore, down: int) -> None:
        self._history.clear()
        self.memory = memory
        self.crash(down)

    def _empty_again(self) -> None:
        self.log("NOT FULL")
        self.memory.is_full = False

    def _carry_out(self, end: End, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        before = self.memory.save()
        reply = run_now(getattr(self.memory, method)(*arguments))
        if method != "look" and method != "renew":
            self._history.append(before)
            if self.world.transcript is not None:
                self.log(f"from {end.peer.owner.name}", method, described(arguments), "->", described(reply))
        end.send((number, reply))


def run_now(coroutine: Any) -> Any:
    """The result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("the store in memory waited")


def described(value: object) -> str:
    """A value for the transcript, cut short."""
    text = repr(value)
    return text if len(text) <= 160 else text[:157] + "..."
