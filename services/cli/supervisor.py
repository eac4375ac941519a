"""Keeps the parts of one machine running: starts them side by side, restarts what dies, ends all of them in order."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.cli.child import PartDied
from services.rpc.first_failure import first_failure


class Part(Protocol):
    """A part of the system: a child process, or the embedded Redis. See Child for what each method promises."""

    @property
    def name(self) -> str: ...

    async def spawn(self) -> None: ...

    async def ready(self) -> str: ...

    async def ended(self) -> PartDied: ...

    async def stop(self, grace_s: float) -> None: ...

    def kill(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When and how often a part that died is started again."""

    first_delay_s: float = 0.5
    delay_s_max: float = 8.0
    tries_max: int = 6  # in a row; then the whole system ends
    settled_s: float = 30.0  # a part that ran this long starts the row anew


class Supervisor:
    """Owns `parts`, given in the order in which they end, which is the reverse of their start. `report` gets one line for people at a time."""

    def __init__(self, parts: Sequence[Part], report: Callable[[str], None], policy: RestartPolicy | None = None) -> None:
        self._parts = tuple(parts)
        self._report = report
        self._policy = policy or RestartPolicy()
        self._began_s = time.monotonic()

    async def start(self) -> None:
        """Spawn all parts at once, then wait until each is ready. Raises PartDied for the first that ends before."""
        for part in reversed(self._parts):
            await part.spawn()
        with first_failure(PartDied):
            async with asyncio.TaskGroup() as group:
                for part in self._parts:
                    group.create_task(self._report_ready(part))

    async def keep(self) -> None:
        """Restart whatever ends, for ever. Raises PartDied for a part that does not come back."""
        with first_failure(PartDied):
            async with asyncio.TaskGroup() as group:
                for part in self._parts:
                    group.create_task(self._keep(part))

    async def stop(self, grace_s: float) -> None:
        """End the parts one after the other; each has `grace_s` seconds. Leaves no process, even when it is cancelled."""
        try:
            for part in self._parts:
                await part.stop(grace_s)
        finally:
            self.kill()

    def kill(self) -> None:
        """SIGKILL every part that still runs."""
        for part in self._parts:
            part.kill()

    async def _report_ready(self, part: Part) -> None:
        address = await part.ready()
        self._report(f"  {part.name:<10} ready after {time.monotonic() - self._began_s:5.1f} s   {address}")

    async def _keep(self, part: Part) -> None:
        tries = 0
        while True:
            began_s = time.monotonic()
            death = await part.ended()
            tries = 1 if time.monotonic() - began_s > self._policy.settled_s else tries + 1
            if tries > self._policy.tries_max:
                raise death
            delay_s = min(self._policy.first_delay_s * 2 ** (tries - 1), self._policy.delay_s_max)
            self._report(f"  {death.how}; starting it again in {delay_s:g} s (try {tries} of {self._policy.tries_max})")
            await asyncio.sleep(delay_s)
            await self._respawn(part)

    async def _respawn(self, part: Part) -> None:
        try:
            await part.spawn()
            address = await part.ready()
        except PartDied:
            return  # `_keep` sees the same end next, and counts it
        self._report(f"  {part.name:<10} is back   {address}")
