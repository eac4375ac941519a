"""One step over gRPC without a model: the scheduler's end of a worker here, a worker that computes nothing in another process."""

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from services.scheduler.core.worker_loss import WorkerLoss
from services.scheduler.worker_link import WorkerLink
from services.worker.config import WorkerConfig
from services.worker.main import run
from tessera.values.batch import ScheduledBatch, ScheduledBatchOutput
from tessera.values.identity import Epoch
from tessera.values.model import KVGeometry, ModelInfo, WorkerDescription, WorkerLimits
from tessera.values.report import WorkerReport
from tests.benchmarks.load.stage import cpu_s

EPOCH, BLOCK_SIZE, CONTEXT = Epoch(1, b"round-trip".ljust(16, b".")), 16, 1024
MODEL = ModelInfo("nothing", "LlamaForCausalLM", 49_152, 1 << 20, (2,), None, "t", "w")
START_TIMEOUT_S = 60.0
WARM_STEPS = 200


class NoEngine:
    """What a worker needs of an engine, without a model: every row gives a token."""

    num_slots_held = 0

    def __init__(self, rows_max: int) -> None:
        geometry = KVGeometry(1 << 16, BLOCK_SIZE, 1, "nothing")
        self.description = WorkerDescription(b"b" * 16, MODEL, geometry, WorkerLimits(rows_max, 1 << 16))

    def report(self, nonce: int) -> WorkerReport:
        """See `Engine`."""
        written = np.zeros(self.description.geometry.num_blocks, np.int64)
        return WorkerReport(nonce, self.description, 0, (), (), written)

    def execute(self, batch: ScheduledBatch, before_pass: Callable[[], None]) -> ScheduledBatchOutput:
        """See `Engine`."""
        before_pass()
        ones = np.ones(batch.num_rows, np.int32)
        return ScheduledBatchOutput(batch.epoch, batch.nonce, batch.step_id, ones, ones * (300 + batch.step_id % 7))


def decode_batch(nonce: int, step_id: int, rows: int) -> ScheduledBatch:
    """A step of decodes, of which every sixteenth needs another block."""
    slots = np.arange(rows, dtype=np.int32)
    needs = ((slots + step_id) % BLOCK_SIZE == 0).astype(np.int32)
    return ScheduledBatch(
        epoch=EPOCH,
        nonce=nonce,
        step_id=step_id,
        durable_step=step_id - 1,
        entries=(),
        drops=(),
        slots=slots,
        num_scheduled_tokens=np.ones(rows, np.int32),
        context_lens=np.full(rows, CONTEXT + step_id, np.int32),
        new_block_counts=needs,
        new_block_ids=np.arange(needs.sum(), dtype=np.int32),
        num_decodes=rows,
        seen_step=max(0, step_id - 2),
    )


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """Microseconds per step: from the batch's columns to those of its output, and CPU of both processes together."""

    p50_us: float
    p99_us: float
    cpu_us: float


class _Listener:
    """Sends the next batch when an output has come."""

    def __init__(self, rows: int, steps: int) -> None:
        self.times_us: list[float] = []
        self.warm, self.done = asyncio.Event(), asyncio.Event()
        self._rows, self._steps = rows, WARM_STEPS + steps
        self._send: Callable[[ScheduledBatch], None] | None = None
        self._nonce = self._step = 0
        self._began_ns = 0

    def worker_attached(self, _address: str, report: WorkerReport, send: Callable[[ScheduledBatch], None]) -> None:
        self._send, self._nonce = send, report.nonce
        self._next()

    def worker_output(self, _address: str, output: ScheduledBatchOutput) -> None:
        assert len(output.token_ids) == self._rows
        self.times_us.append((time.perf_counter_ns() - self._began_ns) / 1000)
        if self._step == WARM_STEPS:
            self.warm.set()
        if self._step < self._steps:
            asyncio.get_running_loop().call_soon(self._next)
        else:
            self.done.set()

    def worker_leaving(self, _address: str) -> None:
        """It does not."""

    def worker_detached(self, _address: str, _loss: WorkerLoss) -> None:
        """At the end."""

    def _next(self) -> None:
        assert self._send is not None
        self._step += 1
        batch = decode_batch(self._nonce, self._step, self._rows)
        self._began_ns = time.perf_counter_ns()
        self._send(batch)


def measured_round_trip(rows: int, steps: int) -> RoundTrip:
    """One batch at a time."""
    with tempfile.TemporaryDirectory() as folder, _worker(Path(folder), rows) as (address, pid):
        return asyncio.run(_measured(address, pid, _Listener, rows, steps))


async def _measured(address: str, pid: int, make: type[_Listener], rows: int, steps: int) -> RoundTrip:
    listener = make(rows, steps)
    link = asyncio.create_task(WorkerLink(address, EPOCH, listener, silence_ms=5000).run())
    await listener.warm.wait()
    used_s = cpu_s(pid) + time.process_time()
    await listener.done.wait()
    used_s = cpu_s(pid) + time.process_time() - used_s
    link.cancel()
    times = sorted(listener.times_us[WARM_STEPS:])
    return RoundTrip(statistics.median(times), times[int(0.99 * len(times))], 1e6 * used_s / len(times))


@contextmanager
def _worker(folder: Path, rows: int) -> Iterator[tuple[str, int]]:
    ready = folder / "ready.json"
    process = subprocess.Popen([sys.executable, "-m", "tests.benchmarks.split.round_trip", str(ready), str(rows)])
    try:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not ready.exists():
            assert process.poll() is None and time.monotonic() < deadline_s, "the worker does not serve"
            time.sleep(0.02)
        yield json.loads(ready.read_text())["address"], process.pid
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """The worker."""
    rows = int(sys.argv[2])
    config = WorkerConfig(model="nothing", listen="127.0.0.1:0", ready_file=Path(sys.argv[1]), log_level="warning")
    run(config, lambda _config, ranks: NoEngine(rows))  # type: ignore[arg-type, return-value]


if __name__ == "__main__":
    main()
