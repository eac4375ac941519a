"""What one decode step costs the scheduler: run `python tests/benchmarks/scheduler_step.py`.

Every sequence decodes at a context of 1,024 tokens with staggered lengths; block 16, prefix caching, stop token ids, two batches in flight. Measured is
process CPU of `schedule`, `postprocess` and `take_changes` per sequence and step; outputs are made beforehand.
"""

import argparse
import gc
import json
import statistics
import time

import numpy as np

from services.scheduler.core.scheduler import Scheduler
from tessera.values.batch import ScheduledBatch, ScheduledBatchOutput
from tessera.values.config import Config
from tessera.values.identity import Epoch
from tessera.values.model import KVGeometry, ModelInfo, WorkerDescription, WorkerLimits
from tessera.values.report import WorkerReport
from tessera.values.request import Submission
from tessera.values.sampling import SamplingParams

WORKER = "worker"
EPOCH = Epoch(1, b"e" * 16)
CONTEXT = 1024
BLOCK_SIZE = 16
BUDGET_US = 0.5


def started(count: int) -> Scheduler:
    """A scheduler with `count` sequences past their prefill."""
    model = ModelInfo("bench", "LlamaForCausalLM", 49_152, 8192, (2,), 1, "t", "w")
    geometry = KVGeometry(count * (CONTEXT // BLOCK_SIZE + 64), BLOCK_SIZE, 1, "bench")
    description = WorkerDescription(b"b" * 16, model, geometry, WorkerLimits(count, 1 << 20))
    config = Config(max_num_seqs=count, max_num_batched_tokens=1 << 20, max_queued_tokens=1 << 30)
    scheduler = Scheduler(config, EPOCH)
    writes = np.zeros(geometry.num_blocks, np.int64)
    scheduler.attach_worker(WORKER, WorkerReport(1, description, 0, (), (), writes), 0)
    random = np.random.default_rng(7)
    for number in range(count):
        prompt = random.integers(0, 49_000, CONTEXT + number % BLOCK_SIZE).astype(np.int32)
        sampling = SamplingParams(seed=number, max_tokens=4096, ignore_eos=True, stop_token_ids=(49_150, 49_151))
        scheduler.submit(Submission(number.to_bytes(16, "big"), prompt, sampling), 0, (), 0)
    batch = scheduler.schedule(WORKER, 0)
    assert batch is not None and batch.num_rows == count
    scheduler.postprocess(WORKER, output_of(batch), 0)
    scheduler.take_changes()
    return scheduler


def output_of(batch: ScheduledBatch) -> ScheduledBatchOutput:
    """What a worker answers, every row sampling one ordinary token."""
    ones, tokens = np.ones(batch.num_rows, np.int32), np.full(batch.num_rows, 300 + batch.step_id % 7, np.int32)
    return ScheduledBatchOutput(batch.epoch, batch.nonce, batch.step_id, ones, tokens)


def measure(count: int, steps: int) -> dict[str, list[float]]:
    """CPU microseconds per step and phase."""
    scheduler = started(count)
    in_flight = [scheduler.schedule(WORKER, 0), scheduler.schedule(WORKER, 0)]
    spent: dict[str, list[float]] = {"schedule": [], "postprocess": [], "take_changes": []}
    for step in range(steps):
        batch = in_flight.pop(0)
        assert batch is not None
        output = output_of(batch)
        marks = [time.process_time_ns()]
        scheduler.postprocess(WORKER, output, step)
        marks.append(time.process_time_ns())
        in_flight.append(scheduler.schedule(WORKER, step))
        marks.append(time.process_time_ns())
        scheduler.take_changes()
        marks.append(time.process_time_ns())
        for phase, begin, end in zip(("postprocess", "schedule", "take_changes"), marks, marks[1:], strict=False):
            spent[phase].append((end - begin) / 1000)
    return spent


def main() -> None:
    """Print a table, and the figures as one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    figures: dict[str, float] = {"budget_us": BUDGET_US}
    print(
        f"{'sequences':>9} {'schedule':>9} {'postprocess':>12} {'take_changes':>13} {'mean':>6} {'p99':>6}   us per sequence and step"
    )
    for count in (32, 256):
        rounds = []
        for _ in range(arguments.rounds):
            rounds.append(measure(count, arguments.steps))
            gc.collect()
        phases = {name: statistics.median(statistics.fmean(r[name]) for r in rounds) / count for name in rounds[0]}
        totals = sorted(sum(step) / count for r in rounds for step in zip(*r.values(), strict=True))
        mean, p99 = sum(phases.values()), totals[int(len(totals) * 0.99)]
        print(
            f"{count:>9} {phases['schedule']:>9.2f} {phases['postprocess']:>12.2f} {phases['take_changes']:>13.2f} {mean:>6.2f} {p99:>6.2f}"
        )
        figures |= {f"mean_us_{count}": round(mean, 2), f"p99_us_{count}": round(p99, 2)}
    print(json.dumps({"benchmark": "scheduler_step", **figures}))


if __name__ == "__main__":
    main()
