"""The whole system as real processes on loopback, for tests: start, kill -9, start again on the same addresses."""

import os
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import psutil
import redis
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.scheduler.store.embedded_redis import EmbeddedRedis
from services.scheduler.terms import SERVICE_NAME as SCHEDULER_SERVICE
from tests.system.role_process import RoleProcess, free_ports

HEALTH_TIMEOUT_S = 0.5


@dataclass
class StackOptions:
    """What a test may set; `model` is for worker and gateway alike unless `worker_model` says otherwise."""

    model: str
    worker_model: str = ""
    scheduler: list[str] = field(default_factory=list)
    worker: list[str] = field(default_factory=list)
    gateway: list[str] = field(default_factory=list)
    schedulers: int = 1
    worker_program: str = "services.cli.main"


MODEL = "SmolLM2-135M-Instruct"

CALM = StackOptions(
    model=MODEL,
    scheduler=["--result-retention-ms", "500", "--lease-ms", "1000", "--log-level", "debug"],
    worker=["--kv-cache-bytes", str(96 * 1024 * 1024)],  # of float16 some 4,300 positions
)
"""The real model in a small pool, a retention that tests can wait for, and a scheduler that says when it is idle."""


class Stack:
    """Redis, worker, schedulers, gateway. `scheduler` is the first of `schedulers`, and the only one unless the options say otherwise."""

    def __init__(self, folder: Path, options: StackOptions) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.redis = EmbeddedRedis(folder / "redis", port=0)
        self.redis.start()
        worker, gateway, *schedulers = (f"127.0.0.1:{port}" for port in free_ports(2 + options.schedulers))
        worker_model = options.worker_model or options.model
        command = ["worker", "--model", worker_model, *options.worker]
        self.worker = RoleProcess("worker", command, worker, folder, program=options.worker_program)
        command = ["scheduler", "--worker", worker, "--redis", self.redis.url, *options.scheduler]
        self.schedulers = [
            RoleProcess(f"scheduler{number or ''}", command, address, folder) for number, address in enumerate(schedulers)
        ]
        self.scheduler = self.schedulers[0]
        command = ["gateway", "--model", options.model, *options.gateway]
        for address in schedulers:
            command += ["--scheduler", address]
        self.gateway = RoleProcess("gateway", command, gateway, folder)
        self.roles = (self.worker, *self.schedulers, self.gateway)

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

    def leader(self) -> RoleProcess | None:
        """The scheduler that leads, by what health says of it; None while none does."""
        for scheduler in self.schedulers:
            if scheduler.is_running and not scheduler.is_frozen and self._leads(scheduler.address):
                return scheduler
        return None

    def request_keys(self) -> list[bytes]:
        """Keys of requests and of the log in Redis; the group's own state and the prefix cache's entries stay."""
        with redis.Redis.from_url(self.redis.url) as store:
            return [key for key in store.scan_iter() if not key.endswith((b":meta", b":lease", b":blocks"))]

    def stop(self) -> None:
        """End everything; nothing stays behind."""
        for role in reversed(self.roles):
            role.stop()
        self.redis.stop()

    @staticmethod
    def _leads(address: str) -> bool:
        with grpc.insecure_channel(address) as channel:
            try:
                request = health_pb2.HealthCheckRequest(service=SCHEDULER_SERVICE)
                answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=HEALTH_TIMEOUT_S)
            except grpc.RpcError:
                return False
            return answer.status == health_pb2.HealthCheckResponse.SERVING

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
