"""How many prefill positions fit into a time: learned from steps, near the truth within a few of them, and never nothing."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.step_times import CHUNK_MIN, GROWTH_MAX, StepTimes

TARGET_US = 100_000


def device(
    decode_us: int, position_us: float, fixed_us: int = 0, chunks: int = 8, decodes: int = 4
) -> tuple[StepTimes, list[int]]:
    """A device that takes so long for the decodes of a step and for each prefill position; returns what steps took, paced."""
    times, taken = StepTimes(), []
    times.answered(decodes, 0, decode_us, decode_us)
    for _ in range(chunks):
        count = times.prefill_positions_max(TARGET_US)
        us = int(decode_us + fixed_us + position_us * count)
        times.answered(decodes, count, us, us)
        taken.append(us)
    return times, taken


def test_before_anything_is_known_a_chunk_is_small() -> None:
    assert StepTimes().prefill_positions_max(TARGET_US) == CHUNK_MIN


@pytest.mark.parametrize("position_us", [5, 50, 500, 2000])
@pytest.mark.parametrize("decode_us", [1000, 40_000])
def test_chunks_grow_until_a_step_takes_as_long_as_it_may(position_us: int, decode_us: int) -> None:
    _, taken = device(decode_us, position_us, chunks=10)
    assert all(us <= 1.05 * TARGET_US for us in taken), taken
    assert taken[-1] >= 0.9 * TARGET_US


def test_a_chunk_is_at_most_a_few_times_as_long_as_those_that_were_timed() -> None:
    times = StepTimes()
    times.answered(0, 10, 1, 1)  # a clock too coarse for it
    assert times.prefill_positions_max(TARGET_US) == GROWTH_MAX * 10


def test_a_short_chunk_between_others_does_not_make_the_next_one_short() -> None:
    """The last piece of a prompt: what is known of the longer ones before it counts on."""
    times, _ = device(20_000, 500, chunks=10)
    before = times.prefill_positions_max(TARGET_US)
    times.answered(4, 1, 20_500, 20_500)
    assert times.prefill_positions_max(TARGET_US) == pytest.approx(before, rel=0.02)


def test_where_decodes_alone_take_the_whole_time_prompts_still_get_on() -> None:
    _, taken = device(2 * TARGET_US, 500)
    assert taken == [2 * TARGET_US + 500 * CHUNK_MIN] * len(taken)


def test_a_prompt_that_slows_down_towards_its_end_is_cut_finer() -> None:
    times, taken = device(20_000, 100, chunks=12)
    for _ in range(12):
        count = times.prefill_positions_max(TARGET_US)
        us = 20_000 + 400 * count
        times.answered(4, count, us, us)
        taken.append(us)
    assert taken[-1] <= 1.1 * TARGET_US
    assert sum(us > 1.5 * TARGET_US for us in taken[12:]) <= 4


def test_decodes_that_have_become_cheaper_leave_more_room() -> None:
    """One that took long is no reason for small chunks for ever: a step with prefills never takes less than its decodes alone."""
    times, _ = device(90_000, 500)
    for _ in range(10):
        count = times.prefill_positions_max(TARGET_US)
        us = 10_000 + 500 * count
        times.answered(1, count, us, us)
    assert us >= 0.8 * TARGET_US


def test_a_step_whose_time_is_not_told_teaches_nothing() -> None:
    times, _ = device(20_000, 500)
    before = times.prefill_positions_max(TARGET_US)
    times.answered(4, 1000, 0, 7)
    assert times.prefill_positions_max(TARGET_US) == before


def test_the_last_prompt_is_the_last_step_with_prefills() -> None:
    times = StepTimes()
    assert times.last_prompt_us == 0
    times.answered(3, 5, 0, 70)
    times.answered(3, 0, 0, 20)
    assert times.last_prompt_us == 70


@settings(max_examples=60, deadline=None)
@given(
    decode_us=st.integers(0, 200_000),
    position_us=st.floats(0.01, 20_000),
    fixed_us=st.integers(0, 50_000),
    decodes=st.integers(0, 8),
)
def test_on_any_device_a_prompt_gets_on_and_paces_itself(
    decode_us: int, position_us: float, fixed_us: int, decodes: int
) -> None:
    times, taken = device(decode_us, position_us, fixed_us, chunks=30, decodes=decodes)
    assert times.prefill_positions_max(TARGET_US) >= CHUNK_MIN
    least = decode_us + fixed_us + position_us * CHUNK_MIN
    assert max(taken[10:]) <= max(1.1 * TARGET_US, 1.01 * least), taken


def test_what_has_no_time_of_its_own_shares_that_of_the_next() -> None:
    """Decodes that prompts have joined: one pass, one time."""
    times = StepTimes()
    times.answered(4, 0, 20_000, 20_000)
    times.answered(4, 0, 0, 70_000)
    times.answered(0, 100, 70_000, 10)
    assert times.prefill_positions_max(100_000) == 160
    times.answered(4, 0, 20_000, 20_000)
    times.answered(0, 100, 50_000, 50_000)
    assert times.prefill_positions_max(100_000) == 160
