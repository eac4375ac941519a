"""What a scenario acts on: a cluster under load, with the verbs for what can happen to it."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.chaos.cluster import Cluster
from tests.chaos.load import Load
from tests.system.role_process import RoleProcess

OOM_BYTES = 1
"""A Redis with this `maxmemory` refuses everything that would need more."""


@dataclass
class Stage:
    """A running cluster and its load. `first_fault_s` is the moment (CLOCK_MONOTONIC) from which pauses count."""

    cluster: Cluster
    load: Load
    say: Callable[[str], None]
    random_kills: int = 100  # how many, where a scenario draws them
    first_fault_s: float | None = None

    def pass_time(self, seconds: float) -> None:
        """Let the cluster go on as it is."""
        threading.Event().wait(seconds)

    def wait(self, what: str, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Poll until `condition` holds."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not after {timeout_s:.0f} s"
            self.pass_time(0.02)

    def fault(self, text: str) -> None:
        """Say what is done to the cluster now."""
        if self.first_fault_s is None:
            self.first_fault_s = time.monotonic()
        self.say(text)

    def kill(self, process: RoleProcess) -> None:
        """kill -9."""
        self.fault(f"kill -9 {process.name}")
        process.kill()

    def restart(self, process: RoleProcess) -> None:
        """Start a dead process again, and wait until it serves."""
        process.start()
        process.wait_ready()

    def terminate(self, process: RoleProcess) -> None:
        """SIGTERM, and wait for a good end."""
        self.fault(f"SIGTERM {process.name}")
        began = time.monotonic()
        status = process.stop()
        assert status == 0, f"{process.name} ended with status {status} after SIGTERM:\n{process.log_tail()}"
        self.say(f"{process.name} ended after {time.monotonic() - began:.1f} s")

    @contextmanager
    def frozen(self, process: RoleProcess) -> Iterator[None]:
        """SIGSTOP, and SIGCONT at the end."""
        self.fault(f"SIGSTOP {process.name}")
        process.freeze()
        yield
        self.say(f"SIGCONT {process.name}")
        process.thaw()

    @contextmanager
    def cut(self, *links: str) -> Iterator[None]:
        """No byte passes until the end."""
        self.fault(f"cut {', '.join(links)}")
        self.cluster.links.cut(*links)
        yield
        self.say(f"heal {', '.join(links)}")
        self.cluster.links.heal(*links)

    def reset(self, *links: str) -> None:
        """End all connections."""
        self.fault(f"reset {', '.join(links)}")
        self.cluster.links.reset(*links)

    @contextmanager
    def slow(self, delay_ms: float, *links: str) -> Iterator[None]:
        """Delay everything until the end."""
        self.fault(f"delay of {delay_ms:.0f} ms on {len(links)} links")
        self.cluster.links.delay(delay_ms, *links)
        yield
        self.cluster.links.heal(*links)

    # -- Redis

    def kill_redis(self) -> None:
        """kill -9; its file stays."""
        self.fault("kill -9 redis")
        self.cluster.redis.kill()

    def start_redis(self) -> None:
        """Start it again on its file, if there is one."""
        self.cluster.redis.start()

    @contextmanager
    def redis_frozen(self) -> Iterator[None]:
        """SIGSTOP, and SIGCONT at the end."""
        self.fault("SIGSTOP redis")
        self.cluster.signal_redis(signal.SIGSTOP)
        yield
        self.say("SIGCONT redis")
        self.cluster.signal_redis(signal.SIGCONT)

    @contextmanager
    def redis_full(self) -> Iterator[None]:
        """Out of memory until the end."""
        self.fault("redis is out of memory")
        with self.cluster.store() as store:
            before = store.config_get("maxmemory")["maxmemory"]
            store.config_set("maxmemory", OOM_BYTES)
            yield
            self.say("redis has memory again")
            store.config_set("maxmemory", before)
