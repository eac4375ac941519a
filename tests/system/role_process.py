"""One process of the system for tests: start, kill -9, freeze, end, and start again on the same address."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from services import bound_process

READY_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 30.0


@dataclass
class RoleProcess:
    """A role: its command line after `tessera`, the address it must have, and the running process if there is one.

    The process dies with the thread that started it, so a test that is killed leaves nothing behind.
    """

    name: str  # of its files, for example gateway1
    command: list[str]  # `tessera` subcommand and options, without --listen and --ready-file
    address: str
    folder: Path
    process: subprocess.Popen | None = None
    starts: int = 0
    program: str = "services.cli.main"  # the module that takes the command line
    is_frozen: bool = False

    @property
    def ready_file(self) -> Path:
        """Written by the process once it serves."""
        return self.folder / f"{self.name}.json"

    @property
    def log(self) -> Path:
        """What the last start wrote."""
        return self.folder / f"{self.name}.{self.starts}.log"

    @property
    def logs(self) -> list[Path]:
        """What every start wrote, the oldest first."""
        return [self.folder / f"{self.name}.{start}.log" for start in range(1, self.starts + 1)]

    @property
    def is_running(self) -> bool:
        """Whether there is a living process, frozen or not."""
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start it, and return at once."""
        assert not self.is_running, f"{self.name} runs already"
        self.ready_file.unlink(missing_ok=True)
        self.starts += 1
        command = [sys.executable, "-I", "-S", bound_process.__file__, str(os.getpid())]
        command += [sys.executable, "-m", self.program, *self.command]
        command += ["--listen", self.address, "--ready-file", str(self.ready_file)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)

    def wait_ready(self) -> None:
        """Wait until it serves."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not self.ready_file.exists():
            assert self.is_running, f"{self.name} ended:\n{self.log_tail()}"
            assert time.monotonic() < deadline, f"{self.name} is not ready:\n{self.log_tail()}"
            time.sleep(0.02)
        assert json.loads(self.ready_file.read_text())["address"] == self.address

    def kill(self) -> None:
        """SIGKILL, and reap."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.is_frozen = False

    def freeze(self) -> None:
        """SIGSTOP."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        self.is_frozen = True

    def thaw(self) -> None:
        """SIGCONT; a no-op for one that is not frozen."""
        if self.is_frozen and self.process is not None:
            self.process.send_signal(signal.SIGCONT)
        self.is_frozen = False

    def stop(self) -> int:
        """SIGTERM, and the exit status; SIGKILL after STOP_TIMEOUT_S counts as a failure."""
        if not self.is_running:
            return 0
        assert self.process is not None
        self.thaw()
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return -signal.SIGKILL

    def events(self) -> list[dict[str, object]]:
        """What the running process logged, so far as it is in lines of JSON."""
        found = []
        for line in self.log.read_text(errors="replace").splitlines():
            if line.startswith("{"):
                with contextlib.suppress(json.JSONDecodeError):  # the last line may not be whole yet
                    found.append(json.loads(line))
        return found

    def log_tail(self, lines: int = 30) -> str:
        """The end of its log, for people."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


PORTS = range(15_000, 32_000)
"""Below what the kernel gives to outgoing connections: nobody takes the port of a server that is just down."""


_given: set[int] = set()


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on at this moment; no port is given twice."""
    found: list[int] = []
    while len(found) < count:
        port = random.choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _given:
                _given.add(port)
                found.append(port)
    return found
