"""One role as a child process: its start, its readiness, its end."""

import asyncio
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from services import bound_process

_READY_POLL_S = 0.02

LOG_TAIL_LINES = 15
"""How much of its log is shown when a child dies."""


class PartDied(Exception):
    """A part of the system ended by itself: `how`, in one line, and `last_words`, the tail of its log. Both are the message."""

    def __init__(self, how: str, last_words: str = "") -> None:
        super().__init__(f"{how}{last_words}")
        self.how = how


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run. `command[0]` is an absolute path; the program writes `{"address": ...}` to `ready_file` once it serves."""

    name: str
    command: tuple[str, ...]
    log: Path
    ready_file: Path


class Child:
    """A child process that cannot outlive this one. Standard output and error go to its log; it gets no Ctrl-C of its own.

    Use it from the event loop of the main thread: the child is killed when the thread that started it ends.
    """

    def __init__(self, spec: ChildSpec) -> None:
        self.name = spec.name
        self._spec = spec
        self._process: asyncio.subprocess.Process | None = None

    async def spawn(self) -> None:
        """Start the process, the first time or again; returns before it is ready."""
        assert self._process is None or self._process.returncode is not None, "already running"
        self._spec.ready_file.unlink(missing_ok=True)
        command = [sys.executable, "-I", "-S", bound_process.__file__, str(os.getpid()), *self._spec.command]
        with self._spec.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    async def ready(self) -> str:
        """Wait until the child serves; its address. Raises PartDied if it ends before."""
        assert self._process is not None, "not spawned"
        while not self._spec.ready_file.exists():
            if self._process.returncode is not None:
                raise self.death()
            await asyncio.sleep(_READY_POLL_S)
        address = json.loads(self._spec.ready_file.read_text())["address"]
        assert isinstance(address, str)
        return address

    async def ended(self) -> PartDied:
        """Wait for the end of the process; what to say about it."""
        assert self._process is not None, "not spawned"
        await self._process.wait()
        return self.death()

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after `grace_s` seconds; returns when the process is gone. A no-op for one that never ran."""
        if self._process is None or self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        """SIGKILL, now; a no-op without a running process."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def death(self) -> PartDied:
        """How the ended process ended, with the tail of its log."""
        assert self._process is not None and self._process.returncode is not None, "still running"
        status = self._process.returncode
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        lines = self._spec.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        tail = "\n".join(f"    {line}" for line in lines) or "    (it wrote nothing)"
        return PartDied(f"{self.name} {how}", f"; last lines of {self._spec.log}:\n{tail}")
