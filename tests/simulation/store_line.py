"""A scheduler's connection to the store: one call at a time, each answered within a bounded time, by `Failed` if by nothing else."""

from collections.abc import Callable
from typing import Any

from services.scheduler.core.journal_call import Failed
from tests.simulation.world import Actor, End

TIMEOUT = 500_000


class StoreLine:
    """Connects by itself, and anew after a failure. A call given up may still be carried out."""

    def __init__(self, owner: Actor, name: str) -> None:
        self._owner, self._name = owner, name
        self._end: End | None = None
        self._number = 0
        self._waiting: Callable[[Any], None] | None = None

    @property
    def is_busy(self) -> bool:
        return self._waiting is not None

    def call(self, method: str, arguments: tuple[Any, ...], answered: Callable[[Any], None]) -> None:
        """`answered` is called later, once, unless the line is closed first."""
        assert self._waiting is None, "one call at a time"
        owner = self._owner
        if self._end is None or not self._end.is_open:
            self._end = owner.world.connect(owner, owner.world.actors["store"], "store")
            if self._end is not None:
                self._end.on_message = lambda reply: self._replied(*reply)
                self._end.on_close = lambda: self._fail(self._number, "connection lost")
        self._number += 1
        number = self._number
        self._waiting = answered
        if self._end is None:
            owner.later(1000, lambda: self._fail(number, "cannot connect"))
            return
        self._end.send((number, method, arguments))
        owner.later(TIMEOUT, lambda: self._fail(number, "timed out"))

    def close(self) -> None:
        """Forget the call under way; nobody is answered any more."""
        self._waiting = None
        if self._end is not None:
            self._end.close()

    def _replied(self, number: int, reply: Any) -> None:
        if number == self._number:
            self._answer(reply)

    def _fail(self, number: int, why: str) -> None:
        if number == self._number and self._waiting is not None:
            if self._end is not None:
                self._end.close()
            self._end = None
            self._answer(Failed(why))

    def _answer(self, reply: Any) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting(reply)
