"""Waits until this process may lead, and takes an epoch then."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from services.rpc.addresses import addresses
from services.scheduler.clock import boot_us
from services.scheduler.config import SchedulerConfig
from services.scheduler.core.journal_call import Failed
from services.scheduler.core.lease import LeaseWatch, next_epoch
from services.scheduler.notice import Notice
from services.scheduler.store.port import EpochMoved, EpochTaken, LeaseView, Store, WrongFormat
from services.scheduler.worker_link import ask_epochs
from tessera.values.identity import Epoch, new_instance_id

_log = structlog.get_logger()

POLL_S = 0.1
"""Pause between two looks at the lease."""

WRONG_FORMAT_RETRY_S = 5.0
"""A store of another version does not change by itself."""

ASK_S = 0.5
"""For workers to say their epochs; who does not answer in time is attached without having been asked."""


@dataclass(frozen=True, slots=True)
class EpochTake:
    """A taken epoch. `asked_us` is when the store was asked for it (`boot_us`), `workers` are those that had told their epochs before."""

    epoch: Epoch
    asked_us: int
    workers: frozenset[str]


class Standby:
    """One wait for the lead: above epoch number `told`, and not for the lease of `mine`, under which this process has just led. `found` is
    told at each look whether there is a store to lead from."""

    def __init__(
        self,
        config: SchedulerConfig,
        store: Store,
        told: int = 0,
        mine: Epoch | None = None,
        found: Callable[[bool], None] | None = None,
    ) -> None:
        self._config = config
        self._store = store
        self._told = told
        self._found = found
        self._watch = LeaseWatch(1000 * config.lease_ms, mine)
        self._workers: frozenset[str] = frozenset()
        self._workers_known = asyncio.Event()
        self._store_notice, self._worker_notice = Notice(_log), Notice(_log, is_fault=False)
        self._wait_notice = Notice(_log, is_fault=False)
        self._leader_seen: Epoch | None = None
        self._pause_s = POLL_S

    async def take(self) -> EpochTake:
        """Wait for as long as it takes."""
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(self._follow_workers())
            await self._workers_known.wait()
            while (taken := await self._turn()) is None:  # noqa: ASYNC110 - what it waits for is elsewhere
                await asyncio.sleep(self._pause_s)
            following.cancel()
        _log.info("epoch taken", epoch=taken.epoch.number)
        return taken

    async def _follow_workers(self) -> None:
        async for present in addresses(self._config.workers):
            self._workers = present
            self._workers_known.set()

    async def _turn(self) -> EpochTake | None:
        """Look once, and take the lead if there is one to take."""
        view = await self._store.look()
        if self._found is not None:
            self._found(isinstance(view, LeaseView))
        if not isinstance(view, LeaseView):
            self._missed(view)
            return None
        self._pause_s = POLL_S
        self._store_notice.end("redis answers")
        if not self._watch.saw(boot_us(), view.epoch, view.is_held, view.is_empty):
            self._note_leader(view)
            self._note_wait(view)
            return None
        held = await ask_epochs(self._workers, ASK_S)
        if not held:
            self._worker_notice.say("waiting for a worker", workers=sorted(self._workers))
            return None
        self._worker_notice.end("workers answer")
        return await self._take(view.epoch, held)

    async def _take(self, stored: Epoch, held: dict[str, Epoch]) -> EpochTake | None:
        asked_us = boot_us()
        epoch = next_epoch(stored, self._told, tuple(held.values()), new_instance_id())
        self._watch.mine = epoch  # also where the answer is lost
        reply = await self._store.take_epoch(stored, epoch, self._config.lease_ms)
        match reply:
            case EpochTaken():
                return EpochTake(epoch, asked_us, frozenset(held))
            case EpochMoved():
                return None
            case _:
                self._missed(reply)
                return None

    def _missed(self, why: WrongFormat | Failed) -> None:
        self._watch.missed()
        self._pause_s = WRONG_FORMAT_RETRY_S if isinstance(why, WrongFormat) else POLL_S
        self._store_notice.say("waiting for redis", error=why.why)

    def _note_wait(self, view: LeaseView) -> None:
        """Say why nobody leads at a first start: an empty redis may have lost a leader that lives, and renews its lease then."""
        if view.is_empty and not view.is_held:
            self._wait_notice.say(
                "redis is empty: waiting for a leader that it may have lost", wait_ms=2 * self._config.lease_ms
            )

    def _note_leader(self, view: LeaseView) -> None:
        if view.is_held and view.epoch != self._leader_seen:
            self._leader_seen = view.epoch
            _log.info("standing by", leader_epoch=view.epoch.number)
