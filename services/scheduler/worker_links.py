"""The links to all workers of one term, as their addresses come and go."""

import asyncio
import itertools
from collections.abc import Sequence
from typing import Protocol

import structlog

from services.rpc.addresses import addresses
from services.rpc.first_failure import first_failure
from services.scheduler.worker_link import OlderEpoch, WorkerLink, WorkerListener
from tessera.values.identity import Epoch

_log = structlog.get_logger()


class FleetListener(WorkerListener, Protocol):
    """Who is told what all links hear."""

    def worker_removed(self, address: str) -> None:
        """The worker is no longer one of ours, and detached; it may come again as a new one."""


class WorkerLinks:
    """Keeps every worker attached that `targets` stand for (see `services.rpc.addresses`).

    A worker whose address has gone keeps its stream for as long as it lives: a name that flickers, or goes before its process
    has drained, costs nothing.
    """

    def __init__(self, targets: Sequence[str], epoch: Epoch, listener: FleetListener, silence_ms: int) -> None:
        self._targets = targets
        self._epoch = epoch
        self._listener = listener
        self._silence_ms = silence_ms
        self._nonces = itertools.count(1)
        self._present: frozenset[str] = frozenset()
        self._links: dict[str, WorkerLink] = {}

    async def run(self) -> None:
        """Run all links for ever. Raises OlderEpoch."""
        with first_failure(OlderEpoch):
            async with asyncio.TaskGroup() as tasks:
                async for present in addresses(self._targets):
                    self._follow(present, tasks)

    def _follow(self, present: frozenset[str], tasks: asyncio.TaskGroup) -> None:
        for address in sorted(self._links.keys() - present):
            self._links[address].retire()
        for address in sorted(present & self._links.keys()):
            self._links[address].reinstate()
        self._present = present
        for address in sorted(present - self._links.keys()):
            _log.info("worker joins", worker=address)
            self._links[address] = WorkerLink(
                address, self._epoch, self._listener, self._silence_ms, self._nonces, self._holder_of
            )
            tasks.create_task(self._keep(address))

    def _holder_of(self, boot_id: bytes) -> str | None:
        """The name under which a process is attached."""
        return next((address for address, link in self._links.items() if link.attached_boot_id == boot_id), None)

    async def _keep(self, address: str) -> None:
        while address in self._present:
            await self._links[address].run()
        del self._links[address]
        _log.info("worker removed", worker=address)
        self._listener.worker_removed(address)
