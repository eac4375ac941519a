"""What one decode step costs: process CPU per sequence, record and frame included."""

import gc
import statistics
from dataclasses import dataclass

from kv_manager.block_table import BlockTable
from tests.benchmarks.control.desk import WORKER, Desk, decoding, prompts

BLOCK_SIZE = 16
WARM_STEPS = 32
GROWTH_SEQS = 128
"""So many at 1,024 tokens fit a pool of 10,000 blocks."""


@dataclass(frozen=True)
class StepCost:
    """Microseconds per sequence and step."""

    mean: float
    p99: float


def step_cost(count: int, steps: int, rounds: int) -> StepCost:
    """`count` requests at a context of 1,024 tokens: the best round's mean, and the 99th percentile of its steps."""
    best: StepCost | None = None
    for _ in range(rounds):
        desk = decoding(count, 1024, count * (1024 + WARM_STEPS + steps + 64) // BLOCK_SIZE)
        _run(desk, WARM_STEPS)
        times = sorted(_run(desk, steps))
        cost = StepCost(statistics.fmean(times) / count, times[int(0.99 * len(times))] / count)
        best = cost if best is None or cost.mean < best.mean else best
        del desk
        gc.collect()
    assert best is not None
    return best


def growth_context(context: int, steps: int, rounds: int) -> float:
    """How many times as much a step costs at `context` tokens as at 1,024."""
    blocks = [GROWTH_SEQS * (length // BLOCK_SIZE + 64) for length in (1024, context)]
    return _ratio(decoding(GROWTH_SEQS, 1024, blocks[0]), decoding(GROWTH_SEQS, context, blocks[1]), steps, rounds)


def growth_pool(num_blocks: int, steps: int, rounds: int) -> float:
    """How many times as much a step costs in a pool of `num_blocks` as in one of 10,000. Every free block is cached, so growing evicts."""
    desks = [decoding(GROWTH_SEQS, 1024, count) for count in (10_000, num_blocks)]
    for desk in desks:
        _fill(desk)
    return _ratio(desks[0], desks[1], steps, rounds)


def _ratio(small: Desk, large: Desk, steps: int, rounds: int) -> float:
    """Of the medians of steps taken in turn, so that what else the machine does meets both."""
    pairs = []
    _run(small, WARM_STEPS), _run(large, WARM_STEPS)
    for _ in range(rounds):
        times = [(_run(small, 1)[0], _run(large, 1)[0]) for _ in range(steps)]
        pairs.append(statistics.median(b for _, b in times) / statistics.median(a for a, _ in times))
    return min(pairs)


def _run(desk: Desk, steps: int) -> list[float]:
    """Microseconds of each of so many steps."""
    times = []
    for _ in range(steps):
        desk.spent_ns = 0
        frame = desk.step()
        times.append(desk.spent_ns / 1000)
        assert all(len(output.token_ids) == 1 for output in frame), "a step that was not only decodes"
    return times


def _fill(desk: Desk) -> None:
    """Publish content in every free block, and give them back."""
    replica = desk.leader.scheduler.replica(WORKER)
    assert replica is not None
    manager, seed = replica.manager, 100
    tables = []
    while manager.num_free_blocks:
        count, seed = min(2048, manager.num_free_blocks), seed + 1
        (ids,) = prompts(1, count * BLOCK_SIZE, 0, seed)
        table = BlockTable()
        manager.allocate(table, manager.match(table, ids), len(ids))
        manager.publish(table, ids, len(ids), 1)
        tables.append(table)
    for table in tables:
        manager.free(table)
    manager.take_changes()
    gc.collect()
