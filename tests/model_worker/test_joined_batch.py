"""Two batches in one pass: when that may be, and that nobody can tell but by the time."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine_driver import NUM_BLOCKS, PROMPT, EngineDriver, Row, drop, entry, pairs, swap
from tiny_llama import Pair
from torch.distributed import HashStore

from model_worker.batch_refused import BatchRefused
from model_worker.joined_batch import can_join, joined, parted
from model_worker.ranks.gloo_group import GlooGroup
from model_worker.ranks.lockstep_model import LockstepModel
from tessera.values.batch import NO_DRAFTS, RowError, ScheduledBatch, ScheduledBatchOutput
from tessera.values.identity import Epoch
from tessera.values.logprobs import Logprobs, PromptLogprobs

LATE = [40, 41, 42, 43, 44]

driver = EngineDriver()
FIRST = driver.batch([Row(0, 1, 7), Row(2, 3, 9)], step_id=4)
SECOND = driver.batch([Row(1, 5, 5)], [entry(1, LATE, [8, 9], "b")], step_id=5)


def test_prompts_may_join_the_batch_before() -> None:
    assert can_join(FIRST, SECOND)
    assert can_join(FIRST, replace(SECOND, drops=(drop(1, "gone"), drop(5))))


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "another attach": ({}, {"nonce": 2}),
    "another epoch": ({}, {"epoch": Epoch(2, b"another-number..")}),
    "nothing before": ({"slots": FIRST.slots[:0], "num_scheduled_tokens": FIRST.slots[:0], "num_decodes": 0}, {}),
    "nothing to join": ({}, {"slots": FIRST.slots[:0]}),
    "a dummy before": ({"is_dummy_run": True}, {}),
    "a dummy": ({}, {"is_dummy_run": True}),
    "a decode": ({}, {"num_decodes": 1}),
    "room for drafts": ({"num_scheduled_tokens": np.array([3, 3], np.int32)}, {}),
    "a swap before": ({"swap_outs": (swap(3, [1], [(7, 1)]),)}, {}),
    "a copy": ({}, {"copies": pairs((1, 2))}),
    "a zeroed block": ({}, {"zero_blocks": np.array([3], np.int32)}),
    "a drop of a row before": ({}, {"drops": (drop(2),)}),
    "a drop of who just entered": ({"entries": (entry(3, PROMPT, [7, 2], "c"),)}, {"drops": (drop(3, "c"),)}),
    "the next chunk of a row before": ({}, {"slots": np.array([2], np.int32)}),
}


@pytest.mark.parametrize(("before", "late"), REFUSED.values(), ids=REFUSED)
def test_others_may_not(before: dict[str, Any], late: dict[str, Any]) -> None:
    assert not can_join(replace(FIRST, **before), replace(SECOND, **late))


def test_an_engine_joins_nobody_where_others_wait_for_each_pass() -> None:
    """In a lockstep group a pass for two batches would leave the others waiting for the second."""
    assert EngineDriver().engine.joins(FIRST, SECOND)
    model = EngineDriver().model
    assert not EngineDriver(LockstepModel(model, GlooGroup(HashStore(), 0, 1))).engine.joins(FIRST, SECOND)


def test_an_output_is_parted_by_rows() -> None:
    counts, ids = np.array([1, 0, 1, 1], np.int32), np.array([70, 71, 72], np.int32)
    numbers = np.arange(3, dtype=np.float32)
    prompts = PromptLogprobs(np.array([0, 1, 2, 0], np.int32), Logprobs(np.array([1, 1, 1], np.int32), ids, numbers, ids))
    output = ScheduledBatchOutput(
        Epoch(1, b"e"),
        1,
        5,
        counts,
        ids,
        (RowError(1, "one"), RowError(3, "three")),
        900,
        NO_DRAFTS,
        Logprobs(np.array([1, 2, 0], np.int32), ids, numbers, np.array([1, 2, 3], np.int32)),
        prompts,
    )
    one, other = parted(output, FIRST)
    assert (one.step_id, one.token_counts.tolist(), one.token_ids.tolist(), one.compute_us) == (4, [1, 0], [70], 0)
    assert (other.step_id, other.token_counts.tolist(), other.token_ids.tolist(), other.compute_us) == (
        5,
        [1, 1],
        [71, 72],
        900,
    )
    assert one.row_errors == (RowError(1, "one"),) and other.row_errors == (RowError(1, "three"),)
    assert one.logprobs is not None and other.logprobs is not None
    assert (one.logprobs.counts.tolist(), other.logprobs.counts.tolist()) == ([1], [2, 0])
    assert (one.logprobs.token_ids.tolist(), other.logprobs.token_ids.tolist()) == ([70], [71, 72])
    assert one.prompt_logprobs is not None and other.prompt_logprobs is not None
    assert [len(each) for each in one.prompt_logprobs.by_row()] == [0, 1]
    assert [each.token_ids.tolist() for each in other.prompt_logprobs.by_row()] == [[71, 72], []]


def batches(of: EngineDriver) -> tuple[ScheduledBatch, ScheduledBatch]:
    """After two requests have entered: one leaves, and the next step of the other; then a prompt into the slot and blocks of the first."""
    of.run([Row(0, 6, 6), Row(1, 5, 5)], [entry(0, PROMPT, [7, 2]), entry(1, LATE, [8, 9], "b")])
    first = of.batch([Row(0, 1, 7)], drops=[drop(1, "b")], step_id=2)
    return first, of.batch([Row(1, 6, 6)], [entry(1, PROMPT[::-1], [9, 8], "c")], step_id=3)


def test_one_pass_leaves_what_two_would(pair: Pair) -> None:
    """Tokens, KV, report and the steps that last wrote each block."""
    one_by_one, together = EngineDriver(pair.ours), EngineDriver(pair.ours)
    outputs = [one_by_one.engine.execute(batch) for batch in batches(one_by_one)]
    first, second = batches(together)
    both, output = together.engine.execute_both(first, second)
    assert both.step_id == 3 and both.num_rows == 2
    for found, expected in zip(parted(output, first), outputs, strict=True):
        assert found.step_id == expected.step_id and found.row_errors == ()
        assert found.token_counts.tolist() == expected.token_counts.tolist()
        assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert np.allclose(together.pool.block(7), one_by_one.pool.block(7), atol=1e-5)
    reports = [each.engine.report(1) for each in (together, one_by_one)]
    assert reports[0].last_write_step.tolist() == reports[1].last_write_step.tolist()
    assert reports[0].last_step == reports[1].last_step == 3
    for found, expected in zip(reports[0].slots, reports[1].slots, strict=True):
        assert found.token_ids.tolist() == expected.token_ids.tolist() and found.computed_len == expected.computed_len


@pytest.mark.parametrize("wrong", [0, 1])
def test_what_does_not_fit_changes_nothing_and_is_found_alone(wrong: int) -> None:
    of = EngineDriver()
    made = list(batches(of))
    made[wrong] = replace(made[wrong], context_lens=made[wrong].context_lens + 1)
    before = of.kv(*range(NUM_BLOCKS)), of.engine.report(1).slots[0].computed_len
    with pytest.raises(BatchRefused):
        of.engine.execute_both(made[0], made[1])
    assert (of.kv(*range(NUM_BLOCKS)), of.engine.report(1).slots[0].computed_len) == before
    assert of.engine.last_step == 1


def test_a_join_has_all_of_both() -> None:
    both = joined(replace(FIRST, seen_step=2), replace(SECOND, seen_step=3, durable_step=1, drops=(drop(9),)))
    assert (both.step_id, both.seen_step, both.durable_step, both.num_decodes) == (5, 2, 1, 1)
    assert (
        both.slots.tolist() == [0, 2, 1]
        and both.context_lens.tolist() == [7, 9, 5]
        and len(both.entries) == 1
        and len(both.drops) == 1
    )


def test_random_prompts_join_random_decodes(pair: Pair) -> None:
    """Of a real model: greedy tokens of everybody, one pass or two."""
    rng = random.Random(3)
    for _ in range(5):
        prompts = [[rng.randrange(90) for _ in range(rng.randint(1, 7))] for _ in range(3)]
        tokens = []
        for is_joined in (False, True):
            of = EngineDriver(pair.ours)
            entries = [entry(slot, ids, [2 * slot + 1, 2 * slot + 2], str(slot)) for slot, ids in enumerate(prompts)]
            rows = [Row(slot, len(ids), len(ids)) for slot, ids in enumerate(prompts)]
            singles_first = sorted(range(2), key=lambda slot: rows[slot].count > 1)
            of.run([rows[slot] for slot in singles_first], entries[:2])
            first = of.batch([Row(slot, 1, len(prompts[slot]) + 1) for slot in (0, 1)], step_id=2)
            late = of.batch([rows[2]], [entries[2]], step_id=3, num_decodes=0)
            if is_joined:
                assert can_join(first, late)
                outputs = parted(of.engine.execute_both(first, late)[1], first)
            else:
                outputs = of.engine.execute(first), of.engine.execute(late)
            tokens.append([output.token_ids.tolist() for output in outputs])
        assert tokens[0] == tokens[1]
