"""Carries journal calls to the store, one at a time."""

import asyncio
from typing import Protocol

import structlog

from services.scheduler.clock import now_us
from services.scheduler.core.journal_call import Failed, JournalCall, JournalReply
from services.scheduler.store.port import Store
from tessera.values.identity import Epoch

_log = structlog.get_logger()

IDLE_WAIT_S = 0.5


class JournalOwner(Protocol):
    """Who decides what is written, and is told what was."""

    def next_journal_call(self) -> JournalCall | None:
        """The call to make now."""

    def journal_replied(self, reply: JournalReply) -> None:
        """The answer to it."""

    def journal_wake_us(self) -> int | None:
        """When `next_journal_call` may answer differently without any event."""


class JournalPump:
    """One leader's writes. `wake` after every event that may have made a record."""

    def __init__(self, store: Store, epoch: Epoch, owner: JournalOwner) -> None:
        self._store = store
        self._epoch = epoch
        self._owner = owner
        self._woken = asyncio.Event()
        self.failure = ""  # why the last call failed; empty where it did not

    def wake(self) -> None:
        """Look for a call soon."""
        self._woken.set()

    async def run(self) -> None:
        """Write for ever; ends by cancellation only."""
        while True:
            call = self._owner.next_journal_call()
            if call is None:
                await self._sleep()
                continue
            reply = await self._store.call(self._epoch, call)
            self._note(reply)
            self._owner.journal_replied(reply)

    async def _sleep(self) -> None:
        wake_us = self._owner.journal_wake_us()
        wait_s = IDLE_WAIT_S if wake_us is None else max(0.001, (wake_us - now_us()) / 1e6)
        try:
            async with asyncio.timeout(wait_s):
                await self._woken.wait()
        except TimeoutError:
            return
        self._woken.clear()

    def _note(self, reply: JournalReply) -> None:
        """Say when the store goes away and when it is back, once each."""
        if isinstance(reply, Failed):
            if not self.failure:
                _log.warning("journal is not written", error=reply.why)
        elif self.failure:
            _log.info("journal is written again")
        self.failure = reply.why if isinstance(reply, Failed) else ""
