"""The whole system as real processes, with a model that computes next to nothing; and what its processes use of the machine."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.system.process_stack import MODEL, Stack, StackOptions
from tests.system.role_process import RoleProcess

KV_CACHE_BYTES = 16 << 20
"""Some two million positions of a model that keeps eight bytes of each."""


@contextmanager
def stage(gateway: Sequence[str] = (), scheduler: Sequence[str] = (), paced: bool = False) -> Iterator[Stack]:
    """Redis, a worker with the deterministic model, a scheduler and a gateway that serve; with these options beside the defaults. `paced`: a
    step takes as long as `paced_worker` says, whatever is in it."""
    # The real tokenizer and vocabulary: the gateway's work is that of any model of this kind.
    kept = ["--kv-cache-bytes", str(KV_CACHE_BYTES), "--threads", "1"]
    program = "tests.benchmarks.load.paced_worker" if paced else "services.cli.main"
    options = StackOptions(MODEL, f"deterministic:{MODEL}", list(scheduler), kept, list(gateway), worker_program=program)
    with tempfile.TemporaryDirectory() as folder, Stack(Path(folder), options) as stack:
        yield stack


def cpu_s(pid: int) -> float:
    """CPU that a process has used so far, user and system; the kernel counts it in steps of 10 ms."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def core_wait_s(pid: int) -> float:
    """How long the threads of a process were ready to run so far and had no core: what else wants the machine costs it that."""
    waits = (file.read_text().split()[1] for file in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return sum(map(int, waits)) / 1e9


def rss_mib(pid: int) -> float:
    """What a process holds of the machine's memory."""
    return float(psutil.Process(pid).memory_info().rss / 2**20)


def pid_of(role: RoleProcess) -> int:
    """The process of a running role."""
    assert role.process is not None
    return role.process.pid


def machine() -> dict[str, object]:
    """What the figures of a run depend on beside the code."""
    return {"cores": len(os.sched_getaffinity(0)), "load": round(os.getloadavg()[0], 1)}
