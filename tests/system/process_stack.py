"""The whole system as real processes on loopback, for tests: start, kill -9, start again on the same addresses."""

import os
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import redis
from role_process import RoleProcess, free_ports

from services.scheduler.store.embedded_redis import EmbeddedRedis


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
        worker, scheduler, gateway = (f"127.0.0.1:{port}" for port in free_ports(3))
        worker_model = options.worker_model or options.model
        self.worker = RoleProcess("worker", ["worker", "--model", worker_model, *options.worker], worker, folder)
        self.scheduler = RoleProcess(
            "scheduler", ["scheduler", "--worker", worker, "--redis", self.redis.url, *options.scheduler], scheduler, folder
        )
        self.gateway = RoleProcess(
            "gateway", ["gateway", "--scheduler", scheduler, "--model", options.model, *options.gateway], gateway, folder
        )
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
    return [event for event in stack.scheduler.events() if event["event"] == "idle"]


def last_idle(stack: Stack) -> dict[str, int]:
    """What the scheduler said when it last had nothing to do; empty before."""
    return (idle_events(stack) or [{}])[-1]
