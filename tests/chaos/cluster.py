"""A whole cluster as real processes on loopback: Redis, schedulers, workers, gateways, and a link between any two of them."""

import os
import signal
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
import redis
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.scheduler.store.embedded_redis import EmbeddedRedis
from tessera.scheduler.v1 import session_pb2
from tests.chaos.links import Links, Route
from tests.chaos.setups import MODEL, RETENTION_MS, Setup
from tests.system.role_process import RoleProcess, free_ports

SCHEDULER_SERVICE = session_pb2.DESCRIPTOR.services_by_name["SchedulerService"].full_name
GROUP = "chaos"
DRAIN_GRACE_S = 2.0
DETACH_GRACE_MS = 5000
"""No client of a chaos run cancels: where a call ends, a connection broke, and the client comes back."""

HEALTH_TIMEOUT_S = 0.5


class Cluster:
    """Processes named gateway1, scheduler2, ... and links named FROM-TO, for example client-gateway1 or scheduler2-redis.

    Both schedulers know a worker by one address, so both reach it through one link (scheduler-worker1).
    """

    def __init__(self, folder: Path, setup: Setup) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.setup = setup
        self.redis = EmbeddedRedis(folder / "redis", port=0)
        self.redis.start()
        self._routes: dict[str, Route] = {}
        self.workers = [self._worker(index) for index in range(1, setup.workers + 1)]
        worker_addresses = [self._route(f"scheduler-{worker.name}", worker.address) for worker in self.workers]
        self.schedulers = [self._scheduler(index, worker_addresses) for index in range(1, setup.schedulers + 1)]
        self.gateways = [self._gateway(index) for index in range(1, setup.gateways + 1)]
        self.client_addresses = tuple(self._route(f"client-{gateway.name}", gateway.address) for gateway in self.gateways)
        self.links = Links(self._routes)

    @property
    def processes(self) -> list[RoleProcess]:
        """All of ours; Redis is apart."""
        return [*self.workers, *self.schedulers, *self.gateways]

    @property
    def link_names(self) -> list[str]:
        """All links."""
        return list(self._routes)

    def start(self) -> None:
        """Start everything and wait until a leader serves."""
        for process in self.processes:
            process.start()
        self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until every process serves and one scheduler leads."""
        for process in self.processes:
            process.wait_ready()
        self.leader()

    def stop(self) -> None:
        """End everything; nothing stays behind."""
        for process in reversed(self.processes):
            process.kill() if process.is_frozen else process.stop()
        self.redis.stop()
        self.links.close()

    # -- who leads

    def leader(self, timeout_s: float = 30.0) -> RoleProcess:
        """The scheduler that leads; waits until there is one."""
        deadline = time.monotonic() + timeout_s
        while True:
            for scheduler in self.schedulers:
                if scheduler.is_running and not scheduler.is_frozen and is_serving(scheduler.address):
                    return scheduler
            if time.monotonic() > deadline:
                tails = "\n".join(f"{scheduler.name}:\n{scheduler.log_tail(12)}" for scheduler in self.schedulers)
                raise AssertionError(f"no scheduler leads after {timeout_s:.0f} s\n{tails}")
            time.sleep(0.05)

    def standby(self) -> RoleProcess:
        """A scheduler that does not lead."""
        leader = self.leader()
        return next(scheduler for scheduler in self.schedulers if scheduler is not leader)

    # -- Redis

    def store(self) -> redis.Redis:
        """A client of the store, past all links; the caller closes it."""
        return redis.Redis.from_url(self.redis.url)

    def kill_redis(self) -> None:
        """SIGKILL; its file stays."""
        self.redis.kill()

    def empty_redis(self) -> None:
        """Delete the file of the killed Redis."""
        for path in self.redis.data_dir.glob("*.aof"):
            path.unlink()

    def signal_redis(self, which: signal.Signals) -> None:
        """Freeze or thaw it."""
        pid = self.redis.pid
        assert pid is not None
        os.kill(pid, which)

    # -- building

    def _worker(self, index: int) -> RoleProcess:
        setup, name = self.setup, f"worker{index}"
        command = ["worker", "--model", setup.model, "--kv-cache-bytes", str(setup.kv_cache_bytes), *setup.worker_options]
        return self._process(name, [*command, "--log-level", "debug"])

    def _scheduler(self, index: int, worker_addresses: list[str]) -> RoleProcess:
        setup, name = self.setup, f"scheduler{index}"
        port = int(self.redis.url.rpartition(":")[2])
        store = self._route(f"{name}-redis", f"127.0.0.1:{port}")
        command = ["scheduler", "--redis", f"redis://{store}", "--group", GROUP, "--lease-ms", str(setup.lease_ms)]
        for address in worker_addresses:
            command += ["--worker", address]
        command += ["--result-retention-ms", str(RETENTION_MS)]
        return self._process(name, [*command, *setup.scheduler_options, "--log-level", "debug"])

    def _gateway(self, index: int) -> RoleProcess:
        name = f"gateway{index}"
        command = ["gateway", "--model", MODEL, "--drain-grace-s", str(DRAIN_GRACE_S)]
        command += ["--detach-grace-ms", str(DETACH_GRACE_MS)]
        for scheduler in self.schedulers:
            command += ["--scheduler", self._route(f"{name}-{scheduler.name}", scheduler.address)]
        return self._process(name, [*command, *self.setup.gateway_options, "--log-level", "debug"])

    def _process(self, name: str, command: list[str]) -> RoleProcess:
        (port,) = free_ports(1)
        return RoleProcess(name, command, f"127.0.0.1:{port}", self.folder)

    def _route(self, name: str, target: str) -> str:
        """The address of a new link to `target`."""
        (port,) = free_ports(1)
        self._routes[name] = Route(port, int(target.rpartition(":")[2]))
        return f"127.0.0.1:{port}"

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def is_serving(address: str, service: str = SCHEDULER_SERVICE) -> bool:
    """Whether the server at `address` says of `service` that it serves."""
    with grpc.insecure_channel(address) as channel:
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=HEALTH_TIMEOUT_S)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
