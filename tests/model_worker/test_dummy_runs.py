"""Rows that belong to nobody: they cost what real ones would, and leave no trace."""

import numpy as np
import pytest
from engine_driver import MAX_LEN, NUM_BLOCKS, PROMPT, VOCAB, EngineDriver, Row, drop, entry, swap
from tiny_llama import Pair
from torch import Tensor
from torch.distributed import HashStore

from model_worker.batch import Batch
from model_worker.kv_pool import KVPool
from model_worker.models.deterministic import DeterministicLM, deterministic_config
from model_worker.ranks.gloo_group import GlooGroup
from model_worker.ranks.lockstep_model import LockstepModel


class WatchedLM(DeterministicLM):
    """Keeps every batch it computes; raises while `is_broken`."""

    def __init__(self) -> None:
        super().__init__(deterministic_config(VOCAB, MAX_LEN))
        self.batches: list[Batch] = []
        self.is_broken = False

    def forward(self, batch: Batch, kv: KVPool) -> Tensor:
        self.batches.append(batch)
        logits = super().forward(batch, kv)
        assert kv.block(kv.null_block).any() == batch.block_tables.eq(kv.null_block).all()
        if self.is_broken:
            raise RuntimeError("the device is gone")
        return logits


def test_a_dummy_run_computes_rows_of_the_given_size_and_path() -> None:
    driver = EngineDriver(model := WatchedLM())
    output = driver.run([Row(0, 1, 9), Row(0, 1, 40), Row(0, 5, 7)], is_dummy_run=True)
    assert output.token_counts.tolist() == [0, 0, 0] and len(output.token_ids) == 0 and output.row_errors == ()
    (batch,) = model.batches
    assert (batch.num_rows, batch.num_tokens, batch.num_decodes) == (3, 7, 2)
    assert batch.context_lens.tolist() == [9, 40, 7] and batch.positions.tolist() == [8, 39, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("in_lockstep", [True, False])
def test_rows_that_have_all_failed_cost_a_pass_where_others_wait_for_one(in_lockstep: bool) -> None:
    model = WatchedLM()
    driver = EngineDriver(LockstepModel(model, GlooGroup(HashStore(), 0, 1)) if in_lockstep else model)
    driver.run([Row(0, 6, 6)], [entry(0, PROMPT, [7, 2])])
    driver.engine._slots.failures[0] = "it cannot be computed"
    output = driver.run([Row(0, 1, 7)])
    assert output.token_counts.tolist() == [0] and [error.message for error in output.row_errors] == ["it cannot be computed"]
    assert [batch.num_tokens for batch in model.batches[1:]] == [1] * in_lockstep
    assert not driver.pool.block(driver.pool.null_block).any()


def test_a_batch_that_only_drops_costs_no_pass() -> None:
    """The next request would wait for it."""
    driver = EngineDriver(model := WatchedLM())
    driver.run([Row(0, 6, 6)], [entry(0, PROMPT, [7, 2])])
    driver.run(drops=[drop(0)])
    assert len(model.batches) == 1 and driver.engine.num_slots_held == 0


def test_a_dummy_run_leaves_no_trace(pair: Pair) -> None:
    """Beside a slot of a real model: pools, report and the slot's next token stay what they would have been."""
    driver, undisturbed = EngineDriver(pair.ours), EngineDriver(pair.ours)
    for each in (driver, undisturbed):
        each.run([Row(0, 6, 6)], [entry(0, PROMPT, [7, 2])])
    driver.run([Row(0, 1, 30), Row(0, 7, 7), Row(0, 9, 20)], is_dummy_run=True)
    assert driver.kv(*range(NUM_BLOCKS)) == undisturbed.kv(*range(NUM_BLOCKS))
    (slot,), (same) = driver.engine.report(1).slots, undisturbed.engine.report(1).slots[0]
    assert np.array_equal(slot.token_ids, same.token_ids) and slot.computed_len == same.computed_len
    assert driver.engine.report(1).last_write_step.tolist() == undisturbed.engine.report(1).last_write_step.tolist()
    assert driver.engine.report(1).last_step == 2
    # Padded reads still meet zeros.
    longer = [*range(20, 40)]
    rows, entries = [Row(0, 1, 7), Row(1, 20, 20)], [entry(1, longer, [8, 9, 10, 11, 12], "b")]
    assert driver.run(rows, entries).token_ids.tolist() == undisturbed.run(rows, entries).token_ids.tolist()
    rows = [Row(0, 1, 8), Row(1, 1, 21, [13])]
    assert driver.run(rows).token_ids.tolist() == undisturbed.run(rows).token_ids.tolist()


def test_kv_moves_beside_a_dummy_run() -> None:
    """A worker of a group may have nothing to compute and still somebody to swap out."""
    driver = EngineDriver()
    driver.run([Row(0, 6, 6)], [entry(0, PROMPT, [7, 2])])
    before = driver.kv(7, 2)
    output = driver.run([Row(0, 1, 1)], swap_outs=(swap(0, [3, 1], [(7, 3), (2, 1)]),), is_dummy_run=True)
    assert output.token_counts.tolist() == [0]
    assert driver.kv(3, 1, is_host=True) == before
    (slot,) = driver.engine.report(1).slots
    assert slot.is_swapped and slot.block_table.tolist() == [3, 1]


@pytest.mark.parametrize(("counts", "num_decodes"), [([3, 3], 0), ([1, 3, 1], 1), ([1, 1, 4], 2)])
def test_a_dummy_run_may_be_of_decodes_with_room_for_drafts(counts: list[int], num_decodes: int) -> None:
    driver = EngineDriver(model := WatchedLM())
    output = driver.run([Row(0, count, 9) for count in counts], is_dummy_run=True, num_decodes=len(counts))
    assert output.row_errors == () and not output.token_counts.any()
    assert model.batches[0].num_decodes == num_decodes


def test_drops_leave_with_a_dummy_run() -> None:
    driver = EngineDriver()
    driver.run([Row(0, 6, 6)], [entry(0, PROMPT, [7, 2])])
    driver.run([Row(0, 1, 1)], drops=[drop(0)], is_dummy_run=True)
    assert driver.engine.num_slots_held == 0


@pytest.mark.parametrize("is_broken", [False, True])
def test_the_null_block_is_clear_after_a_dummy_run(is_broken: bool) -> None:
    driver = EngineDriver(model := WatchedLM())
    model.is_broken = is_broken
    output = driver.run([Row(0, 3, 9)], is_dummy_run=True)
    assert [(error.row, error.message) for error in output.row_errors] == [(0, "RuntimeError: the device is gone")] * is_broken
    assert not driver.pool.block(NUM_BLOCKS).any()
    model.is_broken = False
    assert driver.run([Row(0, 6, 6)], [entry(0, PROMPT, [7, 2])]).row_errors == ()
