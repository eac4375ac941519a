"""Finds the calls whose clients do not read what they are sent.

gRPC takes a message off a handler's hands once there is room for it on the way to the client; until then the write waits, and what comes
meanwhile is joined into one piece (`RequestStream`). So a client that reads slowly gets larger pieces, and one that does not read costs the answer
that it leaves. That has two bounds, one of time and one of tokens; beyond either the call ends, and no reader can hold a seat for ever.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from services.gateway.request_stream import RequestStream
from services.rpc.errors import Overloaded

LOOK_S_MAX = 0.25
"""Pause between two looks at the calls."""

LOOKS_MIN = 4
"""So many looks at least fall into the time that a reader has."""

RESUME_AFTER_MS = 100
"""When a slow reader may resume, where its request waits for that."""


class WatchedCall:
    """One call that streams. `streams` feed it."""

    __slots__ = ("_began", "_streams", "_unread_looks", "timeout", "wrote")

    def __init__(self, streams: Sequence[RequestStream], timeout: asyncio.Timeout) -> None:
        self.timeout = timeout
        self.wrote = True  # no write waits
        self._began = False
        self._streams = streams
        self._unread_looks = 0

    async def write(self, context: Any, response: Any) -> None:
        """Send a message; waits while there is no room for it.

        The call's initial metadata goes ahead of the first one, and is no write that is watched: gRPC notes it as sent only once all that went
        with it is, so a first write that is ended in its midst has it sent again with the status, which then never leaves. No window of the
        client's holds it up, only a connection that takes nothing at all, and that one keepalive ends.
        """
        if not self._began:
            await context.send_initial_metadata(())
            self._began = True
        self.wrote = False
        self._unread_looks = 0
        await context.write(response)
        self.wrote = True

    @property
    def unread_tokens(self) -> int:
        """Tokens that wait behind the message that is being written."""
        return sum(stream.unread_tokens for stream in self._streams)

    def look(self) -> int:
        """How many looks in a row, this one included, have found the same write waiting."""
        self._unread_looks = 0 if self.wrote else self._unread_looks + 1
        return self._unread_looks


class SlowReaders:
    """Watches calls for as long as `run` does. Belongs to one event loop.

    `limit_s`: how long one write may wait, 0 for ever. `tokens_max`: how many tokens may wait behind it. `resume_ms`: how long a request
    waits for its client to resume, 0 where it is aborted.
    """

    def __init__(self, limit_s: float, tokens_max: int, resume_ms: int) -> None:
        # Time is counted in looks: while this process is paused nobody can read, and nobody looks.
        self._look_s = min(LOOK_S_MAX, limit_s / LOOKS_MIN) if limit_s else LOOK_S_MAX
        self._looks_max = math.ceil(limit_s / self._look_s) if limit_s else math.inf
        self._limit_s = limit_s
        self._tokens_max = tokens_max
        self._resume_ms = resume_ms
        self._calls: set[WatchedCall] = set()
        self.num_ended = 0  # calls, so far

    async def run(self) -> None:
        """Look for ever; ends by cancellation only."""
        while True:
            await asyncio.sleep(self._look_s)
            self._look()

    @asynccontextmanager
    async def watching(self, streams: Sequence[RequestStream], can_resume: bool = True) -> AsyncIterator[WatchedCall]:
        """A call, which writes in the body. Raises Overloaded in the midst of a write that waits for too long, or behind which too much waits.
        `can_resume`: its client has a way to."""
        timeout = asyncio.timeout(None)
        call = WatchedCall(streams, timeout)
        try:
            async with timeout:
                self._calls.add(call)
                yield call
        except TimeoutError:
            if not timeout.expired():
                raise
            self.num_ended += 1
            raise self._refusal(call.unread_tokens, self._resume_ms if can_resume else 0) from None
        finally:
            self._calls.discard(call)

    def _look(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for call in self._calls:
            looks = call.look()
            is_slow = looks > self._looks_max or (looks > 1 and call.unread_tokens > self._tokens_max)
            if is_slow and not call.timeout.when():
                call.timeout.reschedule(now_s)

    def _refusal(self, unread_tokens: int, resume_ms: int) -> Overloaded:
        what = (
            f"the client does not read: {unread_tokens} tokens wait behind a message that it has not taken, "
            f"at most {self._tokens_max} may, and none for longer than {self._limit_s:g} s"
        )
        then = f"the request can be resumed within {resume_ms} ms" if resume_ms else "the request is aborted"
        return Overloaded(
            f"{what}; {then}",
            reason="SLOW_READER",
            retry_after_ms=RESUME_AFTER_MS if resume_ms else 0,
            metadata={"unread_tokens": str(unread_tokens)},
        )
