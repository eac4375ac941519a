"""Keeps a leader's lease, and finds out whether it leads still: from the store, and while that is away from its workers."""

import asyncio
from collections.abc import Collection
from typing import Protocol

import structlog

from services.scheduler.clock import boot_us
from services.scheduler.core.journal_call import OlderEpoch
from services.scheduler.core.lease import LeaseHold
from services.scheduler.notice import Notice
from services.scheduler.store.port import LeaseView, Renewed, Store
from services.scheduler.term_end import Deposed
from services.scheduler.worker_link import ask_epochs
from tessera.values.identity import Epoch

_log = structlog.get_logger()

RENEWALS_PER_LEASE = 4

ASK_S = 0.5
"""For workers to answer."""


class LeaseOwner(Protocol):
    """The term whose lease is kept."""

    @property
    def is_stored(self) -> bool:
        """Whether the store has acknowledged the whole state, and has not been seen to lose it."""

    @property
    def attached_workers(self) -> Collection[str]:
        """Whom to ask while the store is away."""

    def confirmed(self) -> None:
        """The epoch was confirmed; what was held back may be said."""

    def store_was_emptied(self) -> None:
        """The store holds nothing of what it had acknowledged."""


class LeaseKeeper:
    """Renews the lease of `epoch` until `release`; tells `hold` of every confirmation."""

    def __init__(self, store: Store, epoch: Epoch, lease_ms: int, hold: LeaseHold, owner: LeaseOwner) -> None:
        self._store = store
        self._epoch = epoch
        self._lease_ms = lease_ms
        self._hold = hold
        self._owner = owner
        self._woken = asyncio.Event()
        self._releasing = False
        self._ended = asyncio.Event()
        self._notice = Notice(_log)

    def wake(self) -> None:
        """Somebody waits for a confirmation."""
        self._woken.set()

    async def run(self) -> None:
        """Renew until released. Raises Deposed."""
        try:
            while not self._releasing:
                await self._renew()
                await self._pause()
            await self._store.release(self._epoch)
        finally:
            self._ended.set()

    async def release(self) -> None:
        """Give the lease back, so that a standby need not wait for its end."""
        self._releasing = True
        self.wake()
        await self._ended.wait()

    async def _renew(self) -> None:
        asked_us, was_stored = self._ask(), self._owner.is_stored
        view = await self._store.look()
        reply = await self._store.renew(self._epoch, self._lease_ms) if isinstance(view, LeaseView) else view
        if isinstance(reply, OlderEpoch):
            raise Deposed.by(reply.epoch)
        if not isinstance(reply, Renewed):
            self._notice.say("lease is not renewed", error=reply.why)
            await self._ask_workers()
            return
        self._notice.end("lease is renewed again")
        assert isinstance(view, LeaseView)
        if view.is_empty and was_stored:
            self._owner.store_was_emptied()
        if view.epoch == self._epoch:
            self._confirm(asked_us)
        else:  # the store had lost the epoch, and with it perhaps that of a later leader
            _log.warning("epoch stored again", epoch=self._epoch.number, found=view.epoch.number)
            await self._ask_workers()

    async def _ask_workers(self) -> None:
        """Who leads, as the workers know it. Raises Deposed."""
        asked_us = self._ask()
        held = await ask_epochs(self._owner.attached_workers, ASK_S)
        for epoch in held.values():
            if not self._epoch.supersedes(epoch):
                raise Deposed.by(epoch)
        if self._epoch in held.values():
            self._confirm(asked_us)

    def _ask(self) -> int:
        """The present moment, as one at which something is asked: a pause that ended before it is seen first."""
        asked_us = boot_us()
        self._hold.may_speak(asked_us)
        return asked_us

    def _confirm(self, asked_us: int) -> None:
        self._hold.confirmed(asked_us)
        self._owner.confirmed()

    async def _pause(self) -> None:
        """Until the next renewal is due, or somebody waits for it."""
        try:
            async with asyncio.timeout(self._lease_ms / 1000 / RENEWALS_PER_LEASE):
                await self._woken.wait()
        except TimeoutError:
            return
        self._woken.clear()
