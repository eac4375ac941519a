"""What is compared: something that runs a workload, and how long that took."""

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from services import bound_process
from tests.benchmarks.workloads import Workload

STOP_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a workload: from its first request to its last token, and means over its requests."""

    seconds: float
    ttft_ms: float
    tpot_ms: float


class Contender(Protocol):
    """Runs workloads, one at a time, with prompts that follow from the seed."""

    def run(self, workload: Workload, seed: int) -> Run:
        """Raises RuntimeError where an answer is not as asked."""


def run_of(timelines: Sequence[tuple[float, Sequence[float]]], workload: Workload) -> Run:
    """From when each request was submitted and when each of its tokens came. Raises RuntimeError where tokens are missing."""
    counts = [len(came) for _, came in timelines]
    if counts != [workload.output_tokens] * workload.requests:
        raise RuntimeError(
            f"{workload.name}: answers have {counts} tokens, not {workload.requests} times {workload.output_tokens}"
        )
    return Run(
        max(came[-1] for _, came in timelines) - min(submitted for submitted, _ in timelines),
        1e3 * statistics.fmean(came[0] - submitted for submitted, came in timelines),
        1e3 * statistics.fmean((came[-1] - came[0]) / (len(came) - 1) for _, came in timelines),
    )


@contextmanager
def process(
    command: Sequence[object], log: Path, environment: Mapping[str, str] | None = None, **pipes: Any
) -> Iterator[subprocess.Popen[str]]:
    """A process that ends with the body, or with this one. What it says goes to `log`, unless `pipes` say otherwise."""
    log.parent.mkdir(parents=True, exist_ok=True)
    bound = [sys.executable, "-I", "-S", bound_process.__file__, str(os.getpid()), *map(str, command)]
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with log.open("wb") as out:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out} | pipes
        started = subprocess.Popen(bound, env=inherited | dict(environment or {}), text=True, **streams)
    try:
        yield started
    finally:
        started.terminate()
        try:
            started.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()
