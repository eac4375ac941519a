"""A batch that does not fit is refused by field and number, and changes nothing."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine_driver import BLOCK, LIMITS, MAX_LEN, NUM_BLOCKS, PROMPT, VOCAB, EngineDriver, Row, drop, entry, int32

from model_worker.batch_refused import BatchRefused
from tessera.values.batch import ScheduledBatch

NUM_SLOTS = 2 * LIMITS.max_num_seqs
FULL_TABLE = list(range(MAX_LEN // BLOCK))


def started() -> EngineDriver:
    """Slot 0 holds a sequence after its first token; slot 1 a prompt whose first four positions are computed; slot 3 one more."""
    driver = EngineDriver()
    entries = [entry(0, PROMPT, [7, 2], "a"), entry(1, PROMPT, [3, 4], "b"), entry(3, [1, 2], [22], "d")]
    driver.run([Row(0, 6, 6), Row(1, 4, 4), Row(3, 2, 2)], entries)
    return driver


def state(driver: EngineDriver) -> Any:
    """All that a report shows, in comparable form."""
    report = driver.engine.report(1)
    slots = [
        (s.slot, s.request_id, s.attempt, s.token_ids.tolist(), s.block_table.tolist(), s.computed_len) for s in report.slots
    ]
    return report.last_step, slots, len(report.dropped), report.last_write_step.tolist()


GOOD_ENTRY = entry(2, [8, 9], [10], "c")

REFUSED: dict[str, tuple[list[Row], list[Any], dict[str, Any], str]] = {
    "step id repeated": ([Row(0, 1, 7)], [], {"step_id": 1}, "step_id 1 is not above 1"),
    "too many rows": ([Row(slot, 1, 1) for slot in range(5)], [], {}, "5 rows, max_num_seqs is 4"),
    "too many positions": ([Row(0, 33, 39)], [], {}, "33 positions, max_num_batched_tokens is 32"),
    "row of a free slot": ([Row(0, 1, 7), Row(2, 1, 1)], [], {}, "row 1 names slot 2, which is free"),
    "row of no slot": ([Row(NUM_SLOTS, 1, 1)], [], {}, f"not among the {NUM_SLOTS}"),
    "row of a negative slot": ([Row(-1, 1, 1)], [], {}, "slot is not among"),
    "two rows for one slot": ([Row(0, 1, 7), Row(0, 1, 8)], [], {}, "slot 0 has two rows"),
    "row of a slot dropped here": ([Row(0, 1, 7)], [], {"drops": [drop(0, "a")]}, "slot 0, which is free"),
    "drop of no slot": ([], [], {"drops": [drop(NUM_SLOTS, "a")]}, f"drop of slot {NUM_SLOTS}"),
    "no position": ([Row(0, 0, 6)], [], {"num_decodes": 0}, "row 0 computes 0 positions"),
    "negative positions": ([Row(0, -1, 5)], [], {"num_decodes": 0}, "computes -1 positions"),
    "wide decode": ([Row(1, 2, 6)], [], {"num_decodes": 1}, "row 0 is a decode of more than one"),
    "start behind": ([Row(0, 1, 6)], [], {}, "row 0 starts at 5, but slot 0 has computed 6"),
    "start ahead": ([Row(1, 1, 6)], [], {}, "row 0 starts at 5, but slot 1 has computed 4"),
    "beyond known ids": ([Row(1, 3, 7)], [], {}, "context_len 7, but slot 1 holds 6 token ids"),
    "beyond its blocks": ([Row(2, 2, 2)], [entry(2, [8, 9], [], "c")], {}, "context_len 2, but its blocks cover 0"),
    "new block outside the pool": ([Row(0, 1, 7, [NUM_BLOCKS])], [], {}, f"pool of {NUM_BLOCKS} blocks"),
    "negative new block": ([Row(0, 1, 7, [-1])], [], {}, "new block id outside the pool"),
    "new block given twice": ([Row(0, 1, 7, [12]), Row(1, 2, 6, [12])], [], {}, "given away twice"),
    "table too long": ([Row(0, 1, 7, FULL_TABLE)], [], {}, "blocks, at most"),
    "entry into a held slot": ([], [entry(1, [8, 9], [10], "c")], {}, "entry into slot 1: the slot is held"),
    "two entries into one slot": ([], [GOOD_ENTRY, GOOD_ENTRY], {}, "slot 2: the slot is held"),
    "entry into no slot": ([], [entry(NUM_SLOTS, [8], [10])], {}, f"the worker has {NUM_SLOTS} slots"),
    "entry without ids": ([], [entry(2, [], [10])], {}, "prompt_len 0 with 0 token ids"),
    "prompt longer than its ids": ([], [entry(2, [8], [10], prompt_len=2)], {}, "prompt_len 2 with 1 token ids"),
    "too many ids": ([], [entry(2, [1] * (MAX_LEN + 1), FULL_TABLE)], {}, f"max_model_len is {MAX_LEN}"),
    "id outside the vocabulary": ([], [entry(2, [8, VOCAB], [10])], {}, f"vocabulary of {VOCAB}"),
    "negative id": ([], [entry(2, [-1], [10])], {}, "outside the vocabulary"),
    "everything cached": ([], [entry(2, [1] * 4, [7], cached=4)], {}, "leaves nothing of 4"),
    "cached beyond its blocks": ([], [entry(2, [1] * 6, [7], cached=5)], {}, "1 blocks do not cover 5 cached"),
    "entry with a block outside the pool": ([], [entry(2, [8], [NUM_BLOCKS])], {}, "block id outside the pool"),
    "entry with a negative block": ([], [entry(2, [8], [0, -2])], {}, "block id outside the pool"),
    "entry with too many blocks": ([], [entry(2, [8], [*FULL_TABLE, 20, 21])], {}, "a sequence has at most"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_batch_that_does_not_fit_changes_nothing(case: str) -> None:
    rows, entries, changes, reason = REFUSED[case]
    driver = started()
    before = state(driver)
    # Beside the fault, a drop and an entry that would be fine: they must not take effect either.
    drops = [drop(3, "d"), *changes.get("drops", ())]
    changes = {name: value for name, value in changes.items() if name != "drops"}
    batch = driver.batch(rows, [entry(4, [1], [23], "e"), *entries], drops, **changes)
    with pytest.raises(BatchRefused, match=reason) as refused:
        driver.engine.execute(batch)
    assert refused.value.step_id == batch.step_id
    assert state(driver) == before
    assert driver.decode(0, 7) >= 0, "the engine goes on"


def test_the_largest_batch_is_accepted() -> None:
    driver = EngineDriver()
    ids = [1] * 8
    entries = [entry(slot, ids, [2 * slot, 2 * slot + 1], str(slot)) for slot in range(4)]
    assert len(driver.run([Row(slot, 8, 8) for slot in range(4)], entries).token_ids) == 4
    driver.run([Row(NUM_SLOTS - 1, 1, 1)], [entry(NUM_SLOTS - 1, [1], [20], "last")])


def test_a_sequence_may_fill_the_model_s_length_and_no_more() -> None:
    driver = EngineDriver()
    ids = [1] * (MAX_LEN - 1)
    driver.run([Row(0, 32, 32)], [entry(0, ids, FULL_TABLE)])
    driver.run([Row(0, 7, 39)])
    driver.decode(0, MAX_LEN)
    with pytest.raises(BatchRefused, match="max_model_len is 40"):
        driver.decode(0, MAX_LEN + 1, [20])


def test_counts_that_overflow_int32_are_refused() -> None:
    driver = started()
    batch: ScheduledBatch = driver.batch([Row(0, 1, 7), Row(1, 2, 6)], num_decodes=0)
    huge = replace(batch, num_scheduled_tokens=int32([2**31 - 1, 2**31 - 1]))
    with pytest.raises(BatchRefused, match="4294967294 positions"):
        driver.engine.execute(huge)
    huge = replace(batch, context_lens=int32([-(2**31), 6]))
    with pytest.raises(BatchRefused, match="row 0 starts at -2147483649"):
        driver.engine.execute(huge)


def test_columns_of_a_message_are_read_only_and_that_is_enough() -> None:
    driver = EngineDriver()
    batch = driver.batch([Row(0, 6, 6)], [entry(0, PROMPT, [7, 2])])
    for column in (
        batch.slots,
        batch.context_lens,
        batch.num_scheduled_tokens,
        batch.new_block_counts,
        batch.entries[0].token_ids,
    ):
        column.flags.writeable = False
    assert driver.engine.execute(batch).token_counts.tolist() == [1]
    assert np.array_equal(batch.slots, [0])
