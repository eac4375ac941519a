"""The whole system as `tessera up` has it, its parts on chosen cores, and what each of them computes."""

import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.live_system import measured, worker_options
from tests.benchmarks.load.stage import cpu_s, pid_of
from tests.benchmarks.split.cores import Placement, on_cores
from tests.benchmarks.workloads import WORKLOADS, Workload
from tests.system.process_stack import Stack, StackOptions
from tests.system.role_process import RoleProcess

WARM_SEED = 1 << 20
"""Of a round that no other is like."""


@dataclass(frozen=True, slots=True)
class WholeRun:
    """`cores` is what each part and the client computed on meanwhile."""

    tokens: int
    seconds: float
    tokens_per_s: float
    cores: dict[str, float]


class Whole:
    """A running system."""

    def __init__(self, stack: Stack, placement: Placement) -> None:
        self._stack = stack
        self._placement = placement
        assert stack.redis.pid is not None
        self._pids = {role.name: pid_of(role) for role in stack.roles} | {"redis": stack.redis.pid}

    def run(self, workload: Workload, seed: int) -> WholeRun:
        """One round."""
        before = {name: cpu_s(pid) for name, pid in self._pids.items()}
        with on_cores(self._placement.others):
            level = measured(self._stack.address, workload, seed)
        seconds = level["duration_s"]
        cores = {name: (cpu_s(pid) - before[name]) / seconds for name, pid in self._pids.items()}
        cores["client"] = level["client_cpu"]
        return WholeRun(level["output_tokens"], seconds, level["output_tokens_per_s"], cores)

    @property
    def worker(self) -> RoleProcess:
        """Its process."""
        return self._stack.worker

    @property
    def scheduler(self) -> RoleProcess:
        """Its process."""
        return self._stack.scheduler


@contextmanager
def whole_system(model: str, precision: str, placement: Placement, *, is_timed: bool = False) -> Iterator[Whole]:
    """One that serves, and is warm. `is_timed`: worker and scheduler say where their time goes, see `phases`."""
    options = StackOptions(model, worker=worker_options(precision), scheduler=[], gateway=[])
    with tempfile.TemporaryDirectory() as folder:
        with on_cores(placement.others):
            stack = Stack(Path(folder), options)
        if is_timed:
            stack.worker.program = "tests.benchmarks.split.timed_worker"
            stack.scheduler.program = "tests.benchmarks.split.timed_scheduler"
        try:
            for role in stack.roles:
                with on_cores(placement.worker if role is stack.worker else placement.others):
                    role.start()
            for role in stack.roles:
                role.wait_ready()
            whole = Whole(stack, placement)
            _warm(whole)
            yield whole
        finally:
            stack.stop()


def _warm(whole: Whole) -> None:
    """The scheduler may not lead yet."""
    for attempt in range(10):
        try:
            whole.run(WORKLOADS[0], WARM_SEED)
            return
        except subprocess.CalledProcessError:
            if attempt == 9:
                raise
            time.sleep(0.5)
