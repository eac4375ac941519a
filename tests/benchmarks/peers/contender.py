"""What is compared: something that runs a workload, and how long that took."""

import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from services import bound_process
from services.bench.arrivals import arrivals_s
from services.bench.figures import Spread, spread_of
from tests.benchmarks.workloads import Workload

STOP_TIMEOUT_S = 20.0

Timeline = tuple[float, Sequence[float]]
"""When a request came, and when each of its tokens did."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a workload: seconds from its first request to its last token, tokens that came, and figures over its requests. It is not
    whole where it was ended for being slow; then the figures are of what had come."""

    seconds: float
    tokens: int
    ttft_ms: Spread
    tpot_ms: float
    is_whole: bool = True

    @property
    def tokens_per_s(self) -> float:
        """Output tokens."""
        return self.tokens / self.seconds


class Contender(Protocol):
    """Runs workloads, one at a time, with prompts that follow from the number of the round."""

    def wake(self) -> None:
        """Its processes go on after having been stopped: return once it serves as before."""

    def run(self, workload: Workload, number: int, limit_s: float = math.inf) -> Run:
        """All requests at once; ended after `limit_s`, by those who can. Raises RuntimeError where an answer is not as asked."""

    def serve(self, workload: Workload, number: int, rate: float) -> Run:
        """The requests come by themselves, so many a second. TTFT is from when each was to come. Raises RuntimeError as well where requests
        cannot come so."""


def arrivals(workload: Workload, number: int, rate: float) -> list[float]:
    """Seconds after the start at which `tessera bench` sends the requests of this round."""
    return list(islice(arrivals_s(rate, 1.0, workload.seed(number)), workload.requests))


def run_of(timelines: Sequence[Timeline], workload: Workload, limit_s: float = math.inf) -> Run:
    """From when each request came and when each of its tokens did. Raises RuntimeError where tokens are missing before `limit_s`."""
    counts = [len(came) for _, came in timelines]
    is_whole = counts == [workload.output_tokens] * workload.requests
    began = min(submitted for submitted, _ in timelines)
    seconds = max((came[-1] for _, came in timelines if came), default=math.inf) - began
    if not is_whole and (limit_s == math.inf or max(counts) > workload.output_tokens):
        raise RuntimeError(
            f"{workload.name}: answers have {counts} tokens, not {workload.requests} times {workload.output_tokens}"
        )
    ttft_ms = spread_of(1e3 * (came[0] - submitted) for submitted, came in timelines if came)
    tpot_ms = [1e3 * (came[-1] - came[0]) / (len(came) - 1) for _, came in timelines if len(came) > 1]
    return Run(
        seconds if is_whole else limit_s,
        sum(counts),
        ttft_ms or spread_of([1e3 * limit_s]),
        statistics.fmean(tpot_ms) if tpot_ms else math.nan,
        is_whole,
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
