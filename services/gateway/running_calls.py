"""The calls of a gateway that generate, and how many there may be."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sized
from contextlib import contextmanager

from services.rpc.errors import Overloaded

RETRY_AFTER_MS = 1000
"""When a refused client should try again: about the length of a short answer."""

SUBJECT = "gateway"
"""Whose quota is used up where it is that of all who ask this gateway."""

RESUMES_FACTOR = 2
"""So many times the limit are taken for resumes: when a gateway dies, its clients come to the others."""


class RunningCalls:
    """Counts them, in all and of each principal (0: as many as there may be in all). `live` are the requests behind them, of which some are
    left over from calls that have ended."""

    def __init__(self, count_max: int, live: Sized, count_max_per_principal: int = 0) -> None:
        self._count_max = count_max
        self._count_max_per_principal = count_max_per_principal
        self._counts: Counter[str] = Counter()  # by principal; of those alone that have a call
        self._live = live
        self._count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def count(self) -> int:
        """Those that run."""
        return self._count

    @contextmanager
    def one(self, is_resume: bool, principal: str = "") -> Iterator[None]:
        """One call, for as long as the body runs. Raises Overloaded where there are too many, of all or of `principal`. Those of nobody in
        particular have no limit of their own."""
        factor = RESUMES_FACTOR if is_resume else 1
        self._check_principal(principal, self._count_max_per_principal * factor)
        count, count_max = max(self._count, len(self._live)), self._count_max * factor
        if count >= count_max:
            text = f"{count} requests are running at this gateway, at most {count_max} may be"
            raise Overloaded(text, reason="OVERLOADED", retry_after_ms=RETRY_AFTER_MS, subject=SUBJECT)
        self._count += 1
        self._counts[principal] += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._count -= 1
            self._counts[principal] -= 1
            if not self._counts[principal]:
                del self._counts[principal]
            if not self._count:
                self._idle.set()

    def _check_principal(self, principal: str, count_max: int) -> None:
        count = self._counts[principal]  # which adds nothing: it is a Counter
        if principal and 0 < count_max <= count:
            text = f"{count} requests of {principal} are running at this gateway, at most {count_max} may be"
            raise Overloaded(
                text,
                reason="PRINCIPAL_LIMIT",
                retry_after_ms=RETRY_AFTER_MS,
                metadata={"principal": principal},
                subject=f"principal:{principal}",
            )

    async def all_ended(self, wait_s: float) -> None:
        """Wait until none is left, at most `wait_s`."""
        try:
            async with asyncio.timeout(wait_s):
                await self._idle.wait()
        except TimeoutError:
            return
