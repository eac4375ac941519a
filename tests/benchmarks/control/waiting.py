"""Whether a long queue costs more than a short one: the pool is full, the delay factor on, and so many requests wait."""

import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from time import process_time_ns

import numpy as np

from services.scheduler.core.admission import Admitted
from services.scheduler.core.scheduler import Scheduler
from tessera.values.batch import ScheduledBatch
from tessera.values.config import Config
from tests.benchmarks.control.desk import EPOCH, WORKER, output_of, prompts, submission, worker_report

BLOCK_SIZE, RUNNING = 64, 64
STEPS = 56
"""Fewer than a block has positions: nobody needs a block of the full pool."""

CALLS = 100
WAITING_LEN = 40


@dataclass(frozen=True)
class QueueRatios:
    """How many times as much a call costs with the longer queue: a schedule of decodes, and adding a request, aborting one from the middle,
    and adding one before all others."""

    schedule: float
    add: float
    abort: float
    priority_add: float


def queue_ratios(few: int, many: int) -> QueueRatios:
    """Of the medians of calls made in turn, so that what else the machine does meets both."""
    rigs = _Rig(few), _Rig(many)
    gc.collect()
    steps = [(rigs[0].step(), rigs[1].step()) for _ in range(STEPS)]
    calls = [(rigs[0].calls(), rigs[1].calls()) for _ in range(CALLS)]
    kinds = [steps] + [[(one[kind], other[kind]) for one, other in calls] for kind in range(3)]
    return QueueRatios(*(statistics.median(b for _, b in kind) / statistics.median(a for a, _ in kind) for kind in kinds))


class _Rig:
    def __init__(self, num_waiting: int) -> None:
        config = Config(
            max_num_seqs=4 * RUNNING,
            max_num_batched_tokens=1 << 20,
            max_queued_tokens=1 << 30,
            max_queued_requests=1 << 20,
            scheduler_delay_factor=0.5,
            queue_order="priority",
        )
        self._scheduler = Scheduler(config, EPOCH)
        context = 16 * BLOCK_SIZE + 1
        self._scheduler.attach_worker(WORKER, worker_report(RUNNING * (context // BLOCK_SIZE + 1), BLOCK_SIZE, 4 * RUNNING), 0)
        self._now_us, self._count = 0, 0
        self._held = np.zeros(4 * RUNNING, np.int32)
        self._batches: list[ScheduledBatch] = []
        for prompt in prompts(RUNNING, context, 0, 1):
            self._add(prompt)
        for _ in range(2):
            self._schedule()
        while self._scheduler.load().num_waiting:
            self.step()
        assert not self._scheduler.load().num_free_blocks, "the pool is to be full"
        self._prompts = prompts(64, WAITING_LEN, 0, 2)
        self._waiting: list[bytes] = [self._add(self._prompts[number % 64]) for number in range(num_waiting)]
        self._scheduler.take_changes()
        self.step(), self.step()

    def step(self) -> float:
        """The worker answers; microseconds of the next schedule."""
        self._now_us += 1000
        self._scheduler.postprocess(WORKER, output_of(self._batches.pop(0), self._held), self._now_us)
        spent = self._timed(self._schedule)
        self._scheduler.take_changes()
        return spent

    def calls(self) -> tuple[float, float, float]:
        """Microseconds of adding, aborting from the middle and adding before all others."""
        prompt = self._prompts[self._count % len(self._prompts)]
        middle = self._waiting.pop(len(self._waiting) // 2)
        add = self._timed(lambda: self._waiting.append(self._add(prompt)))
        abort = self._timed(lambda: self._scheduler.abort(middle, self._now_us))
        first = self._timed(lambda: self._waiting.append(self._add(prompt, -1)))
        self._scheduler.abort(self._waiting.pop(), self._now_us)
        self._scheduler.take_changes()
        return add, abort, first

    def _schedule(self) -> None:
        batch = self._scheduler.schedule(WORKER, self._now_us)
        assert batch is not None
        self._batches.append(batch)

    def _add(self, prompt: np.ndarray, priority: int = 0) -> bytes:
        self._count += 1
        request = submission(self._count, prompt, 1024, priority)
        answer = self._scheduler.submit(request, 0, (), self._now_us)
        assert isinstance(answer, Admitted), answer
        return answer.request_id

    @staticmethod
    def _timed(call: Callable[[], object]) -> float:
        begun = process_time_ns()
        call()
        return (process_time_ns() - begun) / 1000
