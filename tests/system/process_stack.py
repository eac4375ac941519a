"""The whole system as real processes on loopback, for tests: start, kill -9, start again on the same addresses."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import redis

from services.scheduler.store.embedded_redis import EmbeddedRedis

READY_TIMEOUT_S = 90.0


@dataclass
class Role:
    """One process: its command line after `tessera`, the address it must have, and the running process if there is one."""

    name: str
    options: list[str]
    address: str
    folder: Path
    process: subprocess.Popen | None = None
    starts: int = 0

    @property
    def ready_file(self) -> Path:
        return self.folder / f"{self.name}.json"

    def start(self) -> None:
        """Start it, and return at once."""
        assert self.process is None or self.process.poll() is not None, f"{self.name} runs already"
        self.ready_file.unlink(missing_ok=True)
        self.starts += 1
        log = (self.folder / f"{self.name}.{self.starts}.log").open("wb")
        command = [sys.executable, "-m", "services.cli.main", self.name, *self.options]
        command += ["--listen", self.address, "--ready-file", str(self.ready_file)]
        self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        log.close()

    def wait_ready(self) -> None:
        """Wait until it serves."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not self.ready_file.exists():
            assert self.process is not None and self.process.poll() is None, f"{self.name} ended:\n{self.log_tail()}"
            assert time.monotonic() < deadline, f"{self.name} is not ready:\n{self.log_tail()}"
            time.sleep(0.02)
        assert json.loads(self.ready_file.read_text())["address"] == self.address

    def kill(self) -> None:
        """SIGKILL, and reap."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM, and the exit status; SIGKILL after 30 s counts as a failure."""
        if self.process is None or self.process.poll() is not None:
            return 0
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return -signal.SIGKILL

    def log_tail(self) -> str:
        path = self.folder / f"{self.name}.{self.starts}.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-30:])


@dataclass
class StackOptions:
    """What a test may set; `model` is for worker and gateway alike unless `worker_model` says otherwise."""

    model: str
    worker_model: str = ""
    scheduler: list[str] = field(default_factory=list)
    worker: list[str] = field(default_factory=list)
    gateway: list[str] = field(default_factory=list)


MODEL = "SmolLM2-135M-Instruct"

CALM = StackOptions(
    model=MODEL,
    scheduler=["--result-retention-ms", "500", "--log-level", "debug"],
    worker=["--kv-cache-bytes", str(192 * 1024 * 1024)],
)
"""The real model in a small pool, a retention that tests can wait for, and a scheduler that says when it is idle."""


class Stack:
    """Redis, worker, scheduler, gateway."""

    def __init__(self, folder: Path, options: StackOptions) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.redis = EmbeddedRedis(folder / "redis", port=0)
        self.redis.start()
        worker, scheduler, gateway = (f"127.0.0.1:{port}" for port in _free_ports(3))
        worker_model = options.worker_model or options.model
        self.worker = Role("worker", ["--model", worker_model, *options.worker], worker, folder)
        self.scheduler = Role(
            "scheduler", ["--worker", worker, "--redis", self.redis.url, *options.scheduler], scheduler, folder
        )
        self.gateway = Role("gateway", ["--scheduler", scheduler, "--model", options.model, *options.gateway], gateway, folder)
        self.roles = (self.worker, self.scheduler, self.gateway)

    @property
    def address(self) -> str:
        """The public address."""
        return self.gateway.address

    def start(self) -> None:
        """Start everything and wait until it serves."""
        for role in self.roles:
            role.start()
        for role in self.roles:
            role.wait_ready()

    def request_keys(self) -> list[bytes]:
        """Keys of requests and of the log in Redis; the group's own state and the prefix cache's entries stay."""
        with redis.Redis.from_url(self.redis.url) as store:
            return [key for key in store.scan_iter() if not key.endswith((b":meta", b":blocks"))]

    def stop(self) -> None:
        """End everything; nothing stays behind."""
        for role in reversed(self.roles):
            role.stop()
        self.redis.stop()

    def __enter__(self) -> "Stack":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def children_of_this_process() -> list[str]:
    """Command lines of all living descendants."""
    return [" ".join(child.cmdline()) for child in psutil.Process(os.getpid()).children(recursive=True)]


def idle_events(stack: Stack) -> list[dict[str, int]]:
    """Everything that the running scheduler said of idle times: its load then."""
    path = stack.scheduler.folder / f"scheduler.{stack.scheduler.starts}.log"
    events = [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]
    return [event for event in events if event["event"] == "idle"]


def last_idle(stack: Stack) -> dict[str, int]:
    """What the scheduler said when it last had nothing to do; empty before."""
    return (idle_events(stack) or [{}])[-1]


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
