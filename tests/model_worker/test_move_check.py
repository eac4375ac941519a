"""A batch whose swaps, copies or zeroed blocks do not fit is refused by what is wrong, and changes nothing, neither slots nor pools."""

from typing import Any

import numpy as np
import pytest
from engine_driver import (
    BLOCK,
    MAX_LEN,
    NUM_BLOCKS,
    NUM_HOST_BLOCKS,
    PROMPT,
    EngineDriver,
    Row,
    drop,
    entry,
    int32,
    pairs,
    swap,
)

from model_worker.batch_refused import BatchRefused

FULL_TABLE = list(range(MAX_LEN // BLOCK + 1))
NO_SLOT = 8


def started() -> EngineDriver:
    """Slot 0 (blocks 7, 2) and slot 3 (block 22) run; slot 1 is swapped out to host blocks 4 and 5, slot 5 to host block 6."""
    driver = EngineDriver()
    entries = [entry(0, PROMPT, [7, 2], "a"), entry(1, PROMPT, [3, 4], "b"), entry(3, [1, 2], [22], "d")]
    driver.run([Row(0, 6, 6), Row(1, 6, 6), Row(3, 2, 2)], entries)
    driver.run([Row(5, 2, 2)], [entry(5, [1, 2], [23], "f")])
    driver.run(swap_outs=(swap(1, [4, 5], [(3, 4), (4, 5)], "b"), swap(5, [6], [(23, 6)], "f")))
    return driver


def state(driver: EngineDriver) -> Any:
    report = driver.engine.report(1)
    slots = [
        (s.slot, s.request_id, s.token_ids.tolist(), s.block_table.tolist(), s.computed_len, s.is_swapped) for s in report.slots
    ]
    pools = driver.kv(*range(NUM_BLOCKS)), driver.kv(*range(NUM_HOST_BLOCKS), is_host=True)
    return report.last_step, slots, len(report.dropped), report.last_write_step.tolist(), pools


def out_a(table: list[int], moves: list[tuple[int, int]], **changes: Any) -> dict[str, Any]:
    return {"swap_outs": (swap(0, table, moves, "a", **changes),)}


def in_b(table: list[int], moves: list[tuple[int, int]], **changes: Any) -> dict[str, Any]:
    return {"swap_ins": (swap(1, table, moves, "b", **changes),)}


GOOD_OUT = swap(0, [0, 1], [(7, 0), (2, 1)], "a")
GOOD_IN = swap(1, [10, 11], [(4, 10), (5, 11)], "b")

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    # Either way.
    "swap out of no slot": ({"swap_outs": (swap(NO_SLOT, [], []),)}, "slot 8: the worker has 8 slots"),
    "swap out of a free slot": ({"swap_outs": (swap(2, [], []),)}, "slot 2: it is not held by attempt 1"),
    "swap in of a free slot": ({"swap_ins": (swap(2, [], []),)}, "slot 2: it is not held by attempt 1"),
    "swap out of another attempt": (out_a([0, 1], [(7, 0), (2, 1)], attempt=2), "not held by attempt 2"),
    "swap in of another attempt": (in_b([10, 11], [(4, 10), (5, 11)], attempt=2), "not held by attempt 2"),
    "swap out of another request": ({"swap_outs": (swap(0, [0, 1], [(7, 0), (2, 1)], "x"),)}, "not held by attempt 1 of"),
    "swap out of a slot dropped here": ({"swap_outs": (GOOD_OUT,), "drops": [drop(0, "a")]}, "slot 0: it is not held"),
    "swap in of a slot dropped here": ({"swap_ins": (GOOD_IN,), "drops": [drop(1, "b")]}, "slot 1: it is not held"),
    "swapped out twice": ({"swap_outs": (GOOD_OUT, GOOD_OUT)}, "slot 0: it is swapped twice"),
    "swapped in twice": ({"swap_ins": (GOOD_IN, GOOD_IN)}, "slot 1: it is swapped twice"),
    "out and in at once": (
        {"swap_outs": (GOOD_OUT,), "swap_ins": (swap(0, [7, 2], [(0, 7), (1, 2)], "a"),)},
        "swap in of slot 0: it is swapped twice",
    ),
    "swap out of one that is out": ({"swap_outs": (swap(1, [0], [(4, 0)], "b"),)}, "slot 1: it is swapped out"),
    "swap in of one that is not out": ({"swap_ins": (swap(0, [7, 2], [], "a"),)}, "slot 0: it is not swapped out"),
    "entry into a swapped slot": ({"entries": [entry(1, [8], [12], "x")]}, "entry into slot 1: the slot is held"),
    "row of a swapped slot": ({"rows": [Row(0, 1, 7), Row(1, 1, 7)]}, "row 1 names slot 1, which is swapped out"),
    "row of a slot swapped out here": ({"rows": [Row(0, 1, 7)], "swap_outs": (GOOD_OUT,)}, "row 0 names slot 0, which is swapped"),
    # Out.
    "host block outside the pool": (out_a([0, NUM_HOST_BLOCKS], [(7, 0), (2, NUM_HOST_BLOCKS)]), "outside the pool of 12 blocks"),
    "negative host block": (out_a([0, -1], [(7, 0), (2, -1)]), "outside the pool of 12 blocks"),
    "host block twice in a table": (out_a([0, 0], [(7, 0), (2, 0)]), "a block comes twice"),
    "host block of a swapped slot": (out_a([0, 5], [(7, 0), (2, 5)]), "host block 5 is another slot's"),
    "host block of a slot swapped out here": (
        {"swap_outs": (GOOD_OUT, swap(3, [1], [(22, 1)], "d"))},
        "swap out of slot 3: host block 1 is another slot's",
    ),
    "host block of a slot swapped in here": (
        {"swap_outs": (swap(3, [4], [(22, 4)], "d"),), "swap_ins": (GOOD_IN,)},
        "host block 4 is another slot's",
    ),
    "host table too short": (out_a([0], [(7, 0)]), "1 blocks do not cover 6 computed positions"),
    "host table longer than the table": (out_a([0, 1, 2], [(7, 0), (2, 1), (9, 2)]), "3 blocks, it has 2"),
    "pair missing": (out_a([0, 1], [(7, 0)]), "its pairs are not the 2 first blocks"),
    "pair twice": (out_a([0, 1], [(7, 0), (2, 1), (2, 1)]), "its pairs are not the 2 first blocks"),
    "pairs out of order": (out_a([0, 1], [(2, 1), (7, 0)]), "its pairs are not the 2 first blocks"),
    "pair from another's block": (out_a([0, 1], [(7, 0), (22, 1)]), "its pairs are not the 2 first blocks"),
    "pair to a block not in the table": (out_a([0, 1], [(7, 0), (2, 3)]), "its pairs are not the 2 first blocks"),
    # In.
    "block outside the pool": (in_b([10, NUM_BLOCKS], [(4, 10), (5, NUM_BLOCKS)]), f"outside the pool of {NUM_BLOCKS} blocks"),
    "negative block": (in_b([-1, 10], [(4, -1), (5, 10)]), f"outside the pool of {NUM_BLOCKS} blocks"),
    "block twice in a table": (in_b([10, 10], [(4, 10), (5, 10)]), "a block comes twice"),
    "table too short": (in_b([10], [(4, 10)]), "1 blocks do not cover 6 computed positions"),
    "table too long": (in_b([*range(8, 20)], []), "12 blocks, a sequence has at most 11"),
    "pair from another's host block": (in_b([10, 11], [(4, 10), (6, 11)]), "its pairs are not places"),
    "pair from a host block outside the pool": (in_b([10, 11], [(4, 10), (99, 11)]), "its pairs are not places"),
    "pair to another place": (in_b([10, 11], [(4, 11), (5, 10)]), "its pairs are not places"),
    "sources exchanged": (in_b([10, 11], [(5, 10), (4, 11)]), "its pairs are not places"),
    "pair to a block that is not in the table": (in_b([10, 11], [(4, 10), (5, 12)]), "its pairs are not places"),
    "swap-in pairs out of order": (in_b([10, 11], [(5, 11), (4, 10)]), "its pairs are not places"),
    "swap-in pair twice": (in_b([10, 11], [(4, 10), (4, 10)]), "its pairs are not places"),
    "swapped in over a running slot": (in_b([7, 11], [(4, 7), (5, 11)]), "block 7 is in use"),
    "swapped in over a slot swapped in here": (
        {"swap_ins": (GOOD_IN, swap(5, [11], [(6, 11)], "f"))},
        "swap in of slot 5: block 11 is in use",
    ),
    "swapped in over a copy": ({"copies": pairs((7, 11)), "swap_ins": (GOOD_IN,)}, "block 11 is in use"),
    "copied before it is swapped in": ({"copies": pairs((11, 12)), "swap_ins": (GOOD_IN,)}, "block 11 is copied by this batch"),
    # Copies.
    "copy from outside the pool": ({"copies": pairs((NUM_BLOCKS, 1))}, "copies: a block id outside the pool"),
    "copy to outside the pool": ({"copies": pairs((1, NUM_BLOCKS))}, "copies: a block id outside the pool"),
    "copy from a negative block": ({"copies": pairs((-1, 1))}, "copies: a block id outside the pool"),
    "two copies to one block": ({"copies": pairs((7, 10), (2, 10))}, "copies: a block comes twice"),
    "copy into a source": ({"copies": pairs((7, 10), (10, 11))}, "block 10 is a source and a target"),
    "copy onto itself": ({"copies": pairs((10, 10))}, "block 10 is a source and a target"),
    "copy over a running slot": ({"copies": pairs((7, 22))}, "copies: block 22 is in use"),
    # Zero.
    "zeroed block outside the pool": ({"zero_blocks": int32([NUM_BLOCKS])}, "zero_blocks: a block id outside the pool"),
    "zeroed negative block": ({"zero_blocks": int32([-1])}, "zero_blocks: a block id outside the pool"),
    "block zeroed twice": ({"zero_blocks": int32([10, 10])}, "zero_blocks: a block comes twice"),
    "zeroed block of a running slot": ({"zero_blocks": int32([10, 2])}, "zero_blocks: block 2 is in use"),
    "zeroed copy": ({"copies": pairs((7, 10)), "zero_blocks": int32([10])}, "zero_blocks: block 10 is in use"),
    "zeroed block of a slot swapped in here": ({"swap_ins": (GOOD_IN,), "zero_blocks": int32([11])}, "block 11 is in use"),
    "zeroed prefix of a slot swapped in here": (
        {"swap_ins": (swap(1, [3, 11], [(5, 11)], "b"),), "zero_blocks": int32([3])},
        "block 3 is in use",
    ),
    "zeroed cached block": (
        {"entries": [entry(2, [8] * 6, [12, 13], "c", cached=5)], "zero_blocks": int32([13])},
        "zero_blocks: block 13 is a cached one of the entry into slot 2",
    ),
    # Dummy runs.
    "dummy run with an entry": ({"is_dummy_run": True, "rows": [Row(0, 1, 1)], "entries": [entry(2, [8], [12])]}, "a dummy run with entries"),
    "dummy run with a new block": ({"is_dummy_run": True, "rows": [Row(0, 1, 7, [10])]}, "a dummy run with entries or new blocks"),
    "dummy run with a wrong copy": ({"is_dummy_run": True, "rows": [Row(0, 1, 1)], "copies": pairs((7, 2))}, "block 2 is in use"),
    "dummy run of nothing": ({"is_dummy_run": True}, "a dummy run without rows"),
    "dummy run of no position": ({"is_dummy_run": True, "rows": [Row(0, 0, 7)]}, "a row of no position"),
    "dummy run too long": ({"is_dummy_run": True, "rows": [Row(0, 2, MAX_LEN + 1)]}, f"above max_model_len, {MAX_LEN}"),
    "dummy run before its start": ({"is_dummy_run": True, "rows": [Row(0, 3, 2)]}, "a context_len below its row's positions"),
    "dummy run of too many rows": ({"is_dummy_run": True, "rows": [Row(0, 1, 1)] * 5}, "5 rows, max_num_seqs is 4"),
    "dummy run of too many positions": ({"is_dummy_run": True, "rows": [Row(0, 33, 33)]}, "max_num_batched_tokens is 32"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_moves_that_do_not_fit_change_nothing(case: str) -> None:
    changes, reason = REFUSED[case]
    driver = started()
    before = state(driver)
    fields = {"rows": [], "entries": [], "drops": []} | changes
    # Beside the fault, a drop that would be fine: it must not take effect either.
    fields["drops"] = [drop(3, "d"), *fields["drops"]] if "slot swapped out here" not in case else fields["drops"]
    if case == "copy over a running slot" or case == "host block of a slot swapped in here":
        fields["drops"] = []
    rows, entries, drops = fields.pop("rows"), fields.pop("entries"), fields.pop("drops")
    batch = driver.batch(rows, entries, drops, **fields)
    with pytest.raises(BatchRefused, match=reason):
        driver.engine.execute(batch)
    assert state(driver) == before
    assert driver.decode(0, 7) >= 0, "the engine goes on"


def test_moves_that_fit_are_taken() -> None:
    """The good halves of the cases above, at the edges of what is allowed, all in one batch."""
    driver = started()
    driver.run(
        [Row(1, 1, 7), Row(2, 1, 6)],
        [entry(2, PROMPT, [7, 20], "c", cached=5)],
        [drop(3, "d")],
        swap_outs=(swap(0, [NUM_HOST_BLOCKS - 1, 0], [(7, NUM_HOST_BLOCKS - 1), (2, 0)], "a"),),
        copies=pairs((2, 20), (7, 21)),  # from blocks that were swapped out here
        swap_ins=(swap(1, [3, 22, 10], [(5, 22)], "b"),),  # on a prefix that stayed, a block dropped here, and one to grow
        zero_blocks=int32([10, 2]),  # the one to grow into, and one swapped out here
    )
    tables = {slot.slot: (slot.block_table.tolist(), slot.is_swapped) for slot in driver.engine.report(1).slots}
    assert tables == {
        0: ([NUM_HOST_BLOCKS - 1, 0], True),
        1: ([3, 22, 10], False),
        2: ([7, 20], False),
        5: ([6], True),
    }


def test_a_table_may_have_as_many_blocks_as_the_longest_sequence() -> None:
    driver = started()
    driver.run(drops=[drop(0, "a"), drop(3, "d")])
    driver.run(swap_ins=(swap(1, FULL_TABLE, [(4, 0), (5, 1)], "b"),))
    (table,) = (slot.block_table for slot in driver.engine.report(1).slots if slot.slot == 1)
    assert np.array_equal(table, FULL_TABLE)


def test_a_host_block_is_free_again_once_its_slot_is_back_or_gone() -> None:
    driver = started()
    driver.run(swap_ins=(GOOD_IN,))
    driver.run(drops=[drop(5, "f")], swap_outs=(swap(0, [4, 6], [(7, 4), (2, 6)], "a"),))
    driver.run([Row(0, 1, 7)], swap_ins=(swap(0, [7, 2], [], "a"),))
