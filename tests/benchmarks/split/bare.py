"""The bare model loop: the real scheduler and the real engine in one process, without wire, journal, gateway or client.

Run as a program it loads a worker's model (options in JSON), and then answers each line `WORKLOAD SEED` of its input with a line of JSON.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from model_worker.engine import Engine
from services.rpc.logs import configure_logs
from services.worker.config import WorkerConfig
from services.worker.device_config import DeviceConfig
from services.worker.loading import load_engine
from tessera.values.batch import ScheduledBatch, ScheduledBatchOutput
from tessera.values.config import Config
from tests.benchmarks.live_system import PRECISIONS
from tests.benchmarks.split.cores import on_cores
from tests.benchmarks.workloads import WORKLOADS, Workload
from tests.parity.in_process import InProcess


@dataclass(frozen=True, slots=True)
class BareRun:
    """`engine_s` is what the engine took of `seconds`, the rest is the scheduler's."""

    tokens: int
    steps: int
    seconds: float
    engine_s: float

    @property
    def tokens_per_s(self) -> float:
        """Of the engine alone, on the batches that the scheduler makes."""
        return self.tokens / self.engine_s


class _TimedEngine:
    """An engine, and how long it has computed."""

    def __init__(self, engine: Engine) -> None:
        self.seconds = 0.0
        self.report = engine.report
        self._engine = engine

    def execute(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        """See `Engine`."""
        began_s = time.perf_counter()
        output = self._engine.execute(batch)
        self.seconds += time.perf_counter() - began_s
        return output


class _RealTime(InProcess):
    """On the clock that the scheduler has elsewhere."""

    def _tick(self) -> int:
        return time.monotonic_ns() // 1000


class BareLoop:
    """In this process."""

    def __init__(self, model: str, precision: str) -> None:
        compute = DeviceConfig(**PRECISIONS[precision])
        self._engine = load_engine(WorkerConfig(model=model, compute=compute))
        self._timed = _TimedEngine(self._engine)
        self._system: InProcess = _RealTime.of_engine(self._timed, Config())  # type: ignore[arg-type]

    def run(self, workload: Workload, seed: int) -> BareRun:
        """All requests of a round, from the first batch to the last token."""
        info = self._engine.description.model
        if workload.is_warm:
            self._system.generate([workload.warm_prompt(info, seed)], [1])
        prompts = workload.prompts(info, seed)
        self._timed.seconds, self._system.num_steps = 0.0, 0
        began_s = time.perf_counter()
        outputs = self._system.generate(prompts, [workload.output_tokens] * len(prompts))
        seconds = time.perf_counter() - began_s
        return BareRun(sum(map(len, outputs)), self._system.num_steps, seconds, self._timed.seconds)


class BareProcess:
    """A bare loop in a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def run(self, workload: Workload, seed: int) -> BareRun:
        """See `BareLoop`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(workload.name, seed, file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, "the bare loop has ended"
        return BareRun(**json.loads(line))


@contextmanager
def bare_process(model: str, precision: str, cores: frozenset[int]) -> Iterator[BareProcess]:
    """One on these cores, that has loaded its model and is warm."""
    options = json.dumps({"model": model, "precision": precision})
    with on_cores(cores):
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.split.bare", options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    try:
        bare = BareProcess(process)
        bare.run(WORKLOADS[0], WARM_SEED)
        yield bare
    finally:
        process.kill()
        process.wait()


WARM_SEED = 1 << 20
"""Of a round that no other is like."""


def main() -> None:
    """Answer until the input ends."""
    configure_logs("bare loop", "warning")
    options: dict[str, Any] = json.loads(sys.argv[1])
    loop, by_name = BareLoop(**options), {workload.name: workload for workload in WORKLOADS}
    for line in sys.stdin:
        name, seed = line.split()
        print(json.dumps(asdict(loop.run(by_name[name], int(seed)))), flush=True)


if __name__ == "__main__":
    main()
