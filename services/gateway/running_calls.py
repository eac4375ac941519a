"""The calls of a gateway that generate, and how many there may be."""

import asyncio
from collections.abc import Iterator, Sized
from contextlib import contextmanager

from services.rpc.errors import Overloaded

RETRY_AFTER_MS = 1000
"""When a refused client should try again: about the length of a short answer."""

RESUMES_FACTOR = 2
"""So many times the limit are taken for resumes: when a gateway dies, its clients come to the others."""


class RunningCalls:
    """Counts them. `live` are the requests behind them, of which some are left over from calls that have ended."""

    def __init__(self, count_max: int, live: Sized) -> None:
        self._count_max = count_max
        self._live = live
        self._count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def one(self, is_resume: bool) -> Iterator[None]:
        """One call, for as long as the body runs. Raises Overloaded where there are too many."""
        count, count_max = max(self._count, len(self._live)), self._count_max * (RESUMES_FACTOR if is_resume else 1)
        if count >= count_max:
            text = f"{count} requests are running at this gateway, at most {count_max} may be"
            raise Overloaded(text, reason="OVERLOADED", retry_after_ms=RETRY_AFTER_MS)
        self._count += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self._idle.set()

    async def all_ended(self, wait_s: float) -> None:
        """Wait until none is left, at most `wait_s`."""
        try:
            async with asyncio.timeout(wait_s):
                await self._idle.wait()
        except TimeoutError:
            return
