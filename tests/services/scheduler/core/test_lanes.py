"""Sequences that only decode are counted in columns: what comes out is what would come out of counting each by itself."""

from random import Random
from typing import Any

import numpy as np
import pytest
from fake_worker import FakeWorker
from scheduler_rig import WORKER, Rig

from kv_manager.block_manager import BlockManager
from kv_manager.block_table import BlockTable
from services.scheduler.core.changes import Changes
from services.scheduler.core.lane_rows import LaneRows
from services.scheduler.core.lanes import Lanes
from services.scheduler.core.row_index import Rows
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.step_plan import StepPlan
from tessera.values.batch import ScheduledBatch
from tessera.values.config import Config

PLAIN = Config(max_num_seqs=8, max_num_batched_tokens=64)


def told_by(batch: ScheduledBatch) -> tuple[object, ...]:
    """A batch without the order of its decodes and the numbers of its blocks."""
    rows = zip(
        batch.slots.tolist(),
        batch.num_scheduled_tokens.tolist(),
        batch.context_lens.tolist(),
        batch.new_block_counts.tolist(),
        strict=True,
    )
    listed = list(rows)
    entries = [
        (entry.slot, entry.request_id, entry.attempt, entry.token_ids.tolist(), entry.num_cached_tokens)
        for entry in batch.entries
    ]
    assert batch.new_block_counts.sum() == len(batch.new_block_ids)
    decodes, others = sorted(listed[: batch.num_decodes]), listed[batch.num_decodes :]
    return batch.step_id, decodes, others, entries, sorted((drop.slot, drop.request_id, drop.attempt) for drop in batch.drops)


def told_of(changes: Changes) -> tuple[object, ...]:
    """What the journal learns, without the order of requests and the numbers of blocks."""
    deltas = {
        delta.request_id: (
            delta.status,
            delta.attempt,
            delta.token_offset,
            delta.token_ids,
            delta.table_offset,
            len(delta.block_ids),
            delta.finish,
            delta.timings,
        )
        for delta in changes.requests
    }
    rows: dict[bytes, tuple[object, ...]] = {}
    columns = changes.decoded
    if columns is not None:
        grown = dict(zip(columns.grown_rows.tolist(), columns.table_offsets.tolist(), strict=True))
        tokens = zip(columns.request_ids, columns.token_offsets.tolist(), columns.token_ids.tolist(), strict=True)
        rows = {request_id: (offset, token_id, grown.get(row)) for row, (request_id, offset, token_id) in enumerate(tokens)}
        assert len(rows) == len(columns.request_ids), "a request is told twice"
    published = sum(len(delta.published) for delta in changes.blocks)
    return deltas, rows, published, changes.forgotten


def random_request(rng: Random) -> tuple[list[int], dict[str, Any]]:
    """A short prompt, often one that others begin with as well, and rules of every kind by which it may end."""
    prompt = [1, 2, 3, 4, 5, 6, 7, 8][: rng.choice((0, 4, 8))] + [rng.randrange(64) for _ in range(rng.randint(1, 9))]
    rules: dict[str, Any] = {"max_tokens": rng.randint(1, 30), "min_tokens": rng.choice((0, 0, 3))}
    if rng.random() < 0.3:
        rules["stop_token_ids"] = tuple(rng.randrange(64) for _ in range(3))
    if rng.random() < 0.3:
        rules["stop_token_sequences"] = tuple((rng.randrange(64),) * rng.randint(1, 2) for _ in range(8))
    if rng.random() < 0.3:
        rules["ignore_eos"] = False
    return prompt, rules


def transcript(seed: int, config: Config, num_blocks: int, block_size: int) -> list[object]:
    """All that a scheduler says while a random crowd comes, decodes, is aborted and claimed, and its worker attaches anew."""
    rng = Random(seed)
    told: list[object] = []
    rig = Rig(config, FakeWorker(num_blocks, block_size))
    rig.take_every = rng.choice((1, 1, 3))
    real = Scheduler.take_changes

    def heard(scheduler: Scheduler) -> Changes | None:
        changes = real(scheduler)
        if changes is not None:
            told.append(told_of(changes))
        return changes

    rig.scheduler.take_changes = heard.__get__(rig.scheduler)  # type: ignore[method-assign]
    number = 0
    for _ in range(160):
        chance = rng.random()
        if chance < 0.15 and number < 40:
            number += 1
            prompt, rules = random_request(rng)
            rig.try_submit(number, prompt, **rules)
        elif chance < 0.17 and number:
            rig.scheduler.abort(rng.randint(1, number).to_bytes(16, "big"), rig.now_us)
        elif chance < 0.20 and number:
            rig.scheduler.claim(rng.randint(1, number).to_bytes(16, "big"), rng.randint(0, 3), (), rig.now_us)
        elif chance < 0.21:
            rig.attach()
        elif chance < 0.65:
            if len(rig.worker.queue) < 2:
                batch = rig.schedule()
                told.append(None if batch is None else told_by(batch))
        elif rig.worker.queue:
            rig.post(rig.execute())
    rig.finish_all(2)
    rig.take()
    outputs = {sequence.request_id: (sequence.output_token_ids(), sequence.finish) for sequence in rig.scheduler.requests()}
    told.append(outputs)
    return told


KINDS = {
    "roomy": (PLAIN, 400, 4),
    "a token a block": (PLAIN, 600, 1),
    "no cache, little room": (Config(max_num_seqs=8, max_num_batched_tokens=64, enable_prefix_caching=False), 20, 4),
    "prefills first": (Config(max_num_seqs=6, max_num_batched_tokens=16, policy="prefill_first"), 400, 4),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_in_lanes_or_one_by_one_batches_records_and_outputs_are_the_same(
    seed: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    real = StepPlan.add_lanes

    def counted(self: StepPlan, rows: LaneRows, growing: Rows, block_ids: list[int]) -> None:
        steps.append(len(rows))
        real(self, rows, growing, block_ids)

    with monkeypatch.context() as patch:
        patch.setattr(StepPlan, "add_lanes", counted)
        in_lanes = transcript(seed, *KINDS[kind])
    assert sum(steps) > 20, "nobody decoded in a lane"
    with monkeypatch.context() as patch:
        patch.setattr(Sequence, "take_lane", lambda self, lanes: None)
        one_by_one = transcript(seed, *KINDS[kind])
    for ours, theirs in zip(in_lanes, one_by_one, strict=True):
        assert ours == theirs


@pytest.mark.parametrize("kind", ["roomy", "a token a block"])
def test_full_blocks_of_lanes_are_published_together(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, done = [], []
    real = BlockManager.publish_next

    def counted(self: BlockManager, tables: list[BlockTable], *rest: Any) -> int:
        asked.append(len(tables))
        done.append(real(self, tables, *rest))
        return done[-1]

    monkeypatch.setattr(BlockManager, "publish_next", counted)
    transcript(0, *KINDS[kind])
    assert sum(asked) > 10 and sum(done) > sum(asked) / 2


def test_a_lane_is_free_for_the_next_holder_and_forgets_what_ended_the_last() -> None:
    lanes, slots = Lanes(2, 8, block_size=4), np.array([1], np.int32)

    def append(token_id: int) -> tuple[int, bool, bool]:
        num_tokens, may_end, full = lanes.append(slots, np.array([token_id], np.int32))
        return int(num_tokens[0]), bool(may_end), bool(len(full))

    lanes.take(1, num_tokens=4, scheduled=3, prompt_len=3, cap=9, ending_ids=(5, 5, 70))
    assert append(5) == (5, True, True), "5 may end it, and the block of positions 0 to 3 is full"
    assert append(7) == (6, True, False), "an id beyond the vocabulary counts as its last"
    assert lanes.leave(1) == 3 and len(lanes) == 0
    lanes.take(1, num_tokens=2, scheduled=1, prompt_len=1, cap=6, ending_ids=())
    assert [append(5) for _ in range(4)] == [(3, False, False), (4, False, False), (5, False, True), (6, True, False)]


def test_a_lane_near_its_cap_is_looked_at_before_and_after_the_last_row() -> None:
    rig = Rig(PLAIN, FakeWorker(64, 16))
    rig.submit(1, [1, 2, 3], max_tokens=6)
    rig.finish_all(2)
    assert len(rig.output(1)) == 6
    replica = rig.scheduler.replica(WORKER)
    assert replica is not None and len(replica.lanes) == 0
