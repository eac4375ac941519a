"""Swaps, copies and zeroed blocks, seen in what the pools hold afterwards and in the tokens that follow. The model is deterministic and
reads the whole context from the pool."""

import random
from collections.abc import Callable

import numpy as np
import pytest
from engine_driver import PROMPT, VOCAB, EngineDriver, Row, continuation, drop, entry, int32, pairs, swap

from tessera.values.batch import ScheduledBatchOutput
from tessera.values.sampling import SamplingParams


def started() -> EngineDriver:
    """Slot 0: the prompt in blocks 7 and 2, one token sampled."""
    driver = EngineDriver()
    driver.run([Row(0, 6, 6)], [entry(0, PROMPT, [7, 2])])
    return driver


@pytest.mark.parametrize("back", [[7, 2], [2, 7], [20, 0], [0, 7]])
def test_kv_that_was_swapped_out_comes_back_bit_for_bit_wherever_it_goes(back: list[int]) -> None:
    driver = started()
    before = driver.kv(7, 2)
    driver.run(swap_outs=(swap(0, [3, 11], [(7, 3), (2, 11)]),))
    assert driver.kv(3, 11, is_host=True) == before
    # Its blocks are somebody else's meanwhile.
    driver.run([Row(1, 8, 8)], [entry(1, list(range(8)), [2, 7], "other")])
    assert driver.kv(7, 2) != before
    driver.run(drops=[drop(1, "other")])
    driver.run(swap_ins=(swap(0, back, [(3, back[0]), (11, back[1])]),))
    assert driver.kv(*back) == before
    assert [driver.decode(0, 7), driver.decode(0, 8), driver.decode(0, 9, [15])] == continuation(PROMPT, 4)[1:]


def test_a_swapped_slot_is_reported_with_its_host_blocks() -> None:
    driver = started()
    driver.run(swap_outs=(swap(0, [3, 11], [(7, 3), (2, 11)]),))
    (slot,) = driver.engine.report(1).slots
    assert slot.is_swapped and slot.block_table.tolist() == [3, 11]
    assert (slot.computed_len, slot.token_ids.tolist()) == (6, PROMPT + continuation(PROMPT, 1))
    driver.run(swap_ins=(swap(0, [1, 4, 5], [(3, 1), (11, 4)]),))
    (slot,) = driver.engine.report(1).slots
    assert not slot.is_swapped and slot.block_table.tolist() == [1, 4, 5]


def test_blocks_that_still_hold_the_prefix_are_not_copied_in_again() -> None:
    driver = started()
    driver.run(swap_outs=(swap(0, [0, 1], [(7, 0), (2, 1)]),))
    driver.run(swap_ins=(swap(0, [7, 9], [(1, 9)]),))
    assert driver.engine.report(1).last_write_step[[7, 9, 2]].tolist() == [1, 3, 1]
    assert driver.decode(0, 7) == continuation(PROMPT, 2)[1]


def test_one_batch_swaps_out_one_and_in_another_on_its_blocks() -> None:
    driver = started()
    driver.run([Row(1, 4, 4)], [entry(1, [60, 61, 62, 63], [4], "b")])
    driver.run(swap_outs=(swap(1, [5], [(4, 5)], "b"),))
    both = driver.kv(7, 2) + driver.kv(5, is_host=True)
    output = driver.run(
        [Row(1, 1, 5, [2])],
        swap_outs=(swap(0, [0, 1], [(7, 0), (2, 1)]),),
        swap_ins=(swap(1, [7], [(5, 7)], "b"),),
    )
    assert driver.kv(0, 1, is_host=True) + driver.kv(7) == both
    assert output.token_ids.tolist() == continuation([60, 61, 62, 63], 2)[1:]


def test_a_slot_that_has_computed_nothing_can_be_swapped_too() -> None:
    driver = EngineDriver()
    driver.run(entries=[entry(0, PROMPT, [7])])
    driver.run(swap_outs=(swap(0, [], []),))
    driver.run(swap_ins=(swap(0, [3, 4], []),))
    assert driver.run([Row(0, 6, 6)]).token_ids.tolist() == continuation(PROMPT, 1)


def test_a_batch_in_flight_counts_when_the_next_one_swaps_its_slot_out() -> None:
    """Both leave before either has run: the first samples, the second swaps out, and the token is neither lost nor computed again."""
    driver = started()
    first = driver.batch([Row(0, 1, 7)], step_id=2)
    second = driver.batch(step_id=3, swap_outs=(swap(0, [3, 11], [(7, 3), (2, 11)]),))
    assert driver.engine.execute(first).token_ids.tolist() == continuation(PROMPT, 2)[1:]
    driver.engine.execute(second)
    driver.step = 3
    (slot,) = driver.engine.report(1).slots
    assert slot.token_ids.tolist() == PROMPT + continuation(PROMPT, 2) and slot.computed_len == 7
    # Back, and its next row, in one batch.
    output = driver.run([Row(0, 1, 8)], swap_ins=(swap(0, [8, 9], [(3, 8), (11, 9)]),))
    assert output.token_ids.tolist() == continuation(PROMPT, 3)[2:]


def test_noise_goes_on_where_it_was() -> None:
    sampling = SamplingParams(seed=1234, temperature=1.0)

    def tokens(is_swapped: bool) -> list[int]:
        driver = EngineDriver()
        drawn = driver.run([Row(0, 6, 6)], [entry(0, PROMPT, [7, 2], sampling=sampling)]).token_ids.tolist()
        if is_swapped:
            driver.run(swap_outs=(swap(0, [3, 11], [(7, 3), (2, 11)]),))
            driver.run(swap_ins=(swap(0, [1, 4], [(3, 1), (11, 4)]),))
        return [*drawn, driver.decode(0, 7), driver.decode(0, 8), driver.decode(0, 9, [15])]

    assert tokens(True) == tokens(False)


def test_a_slot_dropped_while_it_is_swapped_out_has_no_kv_left() -> None:
    driver = started()
    driver.run(swap_outs=(swap(0, [3, 11], [(7, 3), (2, 11)]),))
    driver.run(drops=[drop(0)])
    report = driver.engine.report(1)
    assert report.slots == ()
    (dropped,) = report.dropped
    assert (len(dropped.block_table), dropped.computed_len) == (0, 0)
    assert dropped.token_ids.tolist() == PROMPT + continuation(PROMPT, 1), "its output is kept all the same"
    driver.run([Row(0, 6, 6)], [entry(0, PROMPT, [1, 2], "new")])
    driver.run(swap_outs=(swap(0, [3, 11], [(1, 3), (2, 11)], "new"),))
    (slot,) = driver.engine.report(1).slots
    assert slot.is_swapped


def test_a_slot_that_enters_after_a_swapped_one_is_not_swapped() -> None:
    driver = started()
    driver.run(swap_outs=(swap(0, [3, 11], [(7, 3), (2, 11)]),))
    output = driver.run([Row(0, 2, 2)], [entry(0, [8, 9], [7], "b")], [drop(0)])
    assert output.token_ids.tolist() == continuation([8, 9], 1)


def test_a_failed_slot_can_be_swapped_by_a_batch_that_was_on_its_way() -> None:
    driver = started()
    masked = SamplingParams(seed=0, temperature=0.0, min_tokens=1, stop_token_ids=tuple(range(VOCAB)))
    failing = entry(1, [1, 2], [4], "f", sampling=masked)
    output = driver.run([Row(1, 2, 2), Row(0, 1, 7)], [failing], num_decodes=0)
    assert [error.row for error in output.row_errors] == [0]
    driver.run([Row(0, 1, 8)], swap_outs=(swap(1, [0], [(4, 0)], "f"),))
    driver.run(swap_ins=(swap(1, [4], [(0, 4)], "f"),))
    assert driver.run([Row(1, 1, 3)]).row_errors[0].message == output.row_errors[0].message


def test_a_copied_block_holds_what_its_source_holds() -> None:
    driver = started()
    driver.run([Row(0, 1, 7)], copies=pairs((7, 20), (2, 21)))
    assert driver.kv(20) == driver.kv(7)
    # Copied before the row wrote position 6.
    source, target = driver.engine.read_blocks([2, 21])
    assert np.array_equal(source.kv[:, :, :2], target.kv[:, :, :2]) and not np.array_equal(source.kv, target.kv)
    assert driver.engine.report(1).last_write_step[[20, 21]].tolist() == [2, 2]


def test_a_fork_computes_its_parent_s_last_position_in_a_block_of_its_own() -> None:
    """The child shares the parent's full block, copies the one of the last prompt position, and samples with its own seed."""
    driver = EngineDriver()
    parent, child = SamplingParams(seed=1, temperature=1.0), SamplingParams(seed=2, temperature=1.0)
    parent_tokens = driver.run([Row(0, 6, 6)], [entry(0, PROMPT, [7, 2], "p", sampling=parent)]).token_ids.tolist()
    fork = entry(1, PROMPT, [7, 9], "c", cached=5, sampling=child)
    output = driver.run([Row(0, 1, 7), Row(1, 1, 6)], [fork], copies=pairs((2, 9)))
    parent_tokens.append(int(output.token_ids[0]))
    child_tokens = [int(output.token_ids[1]), driver.decode(1, 7), driver.decode(1, 8)]
    parent_tokens.append(driver.decode(0, 8))

    def alone(sampling: SamplingParams) -> list[int]:
        driver = EngineDriver()
        first = driver.run([Row(0, 6, 6)], [entry(0, PROMPT, [7, 2], sampling=sampling)]).token_ids.tolist()
        return [*first, driver.decode(0, 7), driver.decode(0, 8)]

    assert (parent_tokens, child_tokens) == (alone(parent), alone(child))
    assert parent_tokens != child_tokens


def test_a_zeroed_block_holds_nothing() -> None:
    driver = started()
    driver.run(drops=[drop(0)])
    assert any(driver.kv(7)[0])
    output = driver.run([Row(1, 2, 2)], [entry(1, [8, 9], [7], "b")], zero_blocks=int32([7, 2]))
    assert output.token_ids.tolist() == continuation([8, 9], 1)
    assert not any(driver.kv(2)[0])
    (block,) = driver.engine.read_blocks([7])
    assert block.kv[:, :, :2].any() and not block.kv[:, :, 2:].any(), "what the new owner wrote, and nothing of the old one"
    assert driver.engine.report(1).last_write_step[[7, 2]].tolist() == [3, 3]


def test_every_move_counts_as_a_write_and_a_swap_out_does_not() -> None:
    driver = started()
    driver.run(swap_outs=(swap(0, [3, 11], [(7, 3), (2, 11)]),))
    written = driver.engine.report(1).last_write_step
    assert written[[7, 2]].tolist() == [1, 1] and written.sum() == 2
    driver.run(swap_ins=(swap(0, [1, 4], [(3, 1), (11, 4)]),), copies=pairs((7, 5)), zero_blocks=int32([6]))
    written = driver.engine.report(1).last_write_step
    assert written[[1, 4, 5, 6]].tolist() == [3, 3, 3, 3] and written.sum() == 14


# What of a wrong batch the tokens show. Each defect is one that the checks of a batch cannot see.


def swapped(defect: str) -> Callable[[list[int]], list[int]]:
    """Tokens of a prompt of four blocks that is swapped out and in again, by an order of blocks with a defect."""

    def tokens(prompt: list[int]) -> list[int]:
        driver = EngineDriver()
        driver.run([Row(1, 16, 16)], [entry(1, [token ^ 1 for token in prompt], [16, 17, 18, 19], "before")])
        driver.run([Row(0, 16, 16)], [entry(0, prompt, [0, 1, 2, 3])], [drop(1, "before")])
        driver.run(swap_outs=(swap(0, [0, 1, 2, 3], [(0, 0), (1, 1), (2, 2), (3, 3)]),))
        back, moves = {
            "none": ([0, 1, 6, 7], [(2, 6), (3, 7)]),
            "a missing pair": ([0, 1, 16, 7], [(3, 7)]),
            "blocks of another prompt": ([0, 17, 6, 7], [(2, 6), (3, 7)]),
            "two blocks exchanged": ([1, 0, 6, 7], [(2, 6), (3, 7)]),
            "a block that nobody wrote": ([20, 1, 6, 7], [(2, 6), (3, 7)]),
        }[defect]
        return first_tokens(driver.run([Row(0, 1, 17, [9])], swap_ins=(swap(0, back, moves),)), driver, 0)

    return tokens


def forked(defect: str) -> Callable[[list[int]], list[int]]:
    """Tokens of a fork, with a defect in what it copies or shares."""

    def tokens(prompt: list[int]) -> list[int]:
        driver = EngineDriver()
        driver.run([Row(1, 15, 15)], [entry(1, [token ^ 1 for token in prompt[:15]], [16, 17, 18, 19], "before")])
        driver.run([Row(0, 15, 15)], [entry(0, prompt[:15], [0, 1, 2, 3], "p")], [drop(1, "before")])
        table, copies = {
            "none": ([0, 1, 2, 9], pairs((3, 9))),
            "no copy": ([0, 1, 2, 9], pairs()),
            "a copy of another block": ([0, 1, 2, 9], pairs((2, 9))),
            "a stale block": ([0, 1, 2, 19], pairs()),
            "a shared block of another prompt": ([0, 17, 2, 9], pairs((3, 9))),
        }[defect]
        fork = entry(2, prompt[:15], table, "c", cached=14)
        return first_tokens(driver.run([Row(2, 1, 15)], [fork], copies=copies), driver, 2, 15)

    return tokens


def first_tokens(output: ScheduledBatchOutput, driver: EngineDriver, slot: int, length: int = 17) -> list[int]:
    (first,) = output.token_ids.tolist()
    return [first, *(driver.decode(slot, length + count, [20 + count]) for count in range(1, 4))]


@pytest.mark.parametrize(
    ("scene", "defects"),
    [
        (swapped, ["a missing pair", "blocks of another prompt", "two blocks exchanged", "a block that nobody wrote"]),
        (forked, ["no copy", "a copy of another block", "a stale block", "a shared block of another prompt"]),
    ],
)
def test_the_deterministic_model_shows_every_block_that_is_not_what_it_should_be(
    scene: Callable[[str], Callable[[list[int]], list[int]]], defects: list[str]
) -> None:
    """Four tokens of 97: a defect that changes the state stays unseen once in some ninety million prompts."""
    rng = random.Random(7)
    for _ in range(25):
        prompt = rng.sample(range(2, VOCAB - 1), 16)
        right = scene("none")(prompt)
        for defect in defects:
            assert scene(defect)(prompt) != right, (defect, prompt)
