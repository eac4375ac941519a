"""When a step counts as a hang: far beyond its predicted time, and never because a machine or a prompt is only slow."""

import pytest

from services.scheduler.core.step_clock import COLD_FLOOR_US, FLOOR_US, RATES_MAX, UNMEASURED_US, StepClock


def measured(*steps: tuple[int, int]) -> StepClock:
    """A clock that has seen steps of (positions, microseconds)."""
    clock = StepClock()
    for step_id, (positions, us) in enumerate(steps, 1):
        clock.sent(step_id, positions)
        clock.answered(step_id, us)
    return clock


def test_nothing_in_flight_is_never_overdue() -> None:
    assert StepClock().advance(10 * UNMEASURED_US) is None


def test_a_step_before_any_was_measured_has_a_long_time() -> None:
    clock = StepClock()
    clock.sent(1, 512)
    assert clock.advance(UNMEASURED_US) is None
    overdue = clock.advance(1)
    assert overdue is not None and (overdue.step_id, overdue.positions) == (1, 512)
    assert "step 1 of 512 positions has taken 900.0 s" in str(overdue)


@pytest.mark.parametrize(
    ("steps", "positions", "limit_us"),
    [
        ([(1, 15_000)], 1, FLOOR_US),
        ([(256, 200_000)], 512, FLOOR_US),
        ([(512, 8_000_000)], 512, 40_000_000),
        ([(512, 8_000_000)], 256, 20_000_000),
        ([(512, 8_000_000), *[(256, 50_000)] * (RATES_MAX - 1)], 512, 40_000_000),  # the slowest pace of the last steps
        ([(512, 8_000_000), *[(256, 50_000)] * RATES_MAX], 512, FLOOR_US),
        ([(512, 8_000_000), (0, 0)], 512, 40_000_000),
    ],
)
def test_five_times_the_predicted_time_and_no_less_than_the_floor(
    steps: list[tuple[int, int]], positions: int, limit_us: int
) -> None:
    clock = measured(*steps)
    assert clock.limit_us(positions) == limit_us
    clock.sent(99, positions)
    assert clock.advance(limit_us) is None
    assert clock.advance(1) is not None


def test_a_long_prefill_on_a_slow_machine_is_no_hang() -> None:
    """Chunks of 512 at a growing context, each a little slower than the last, up to 30 s of each."""
    clock = StepClock()
    for step_id in range(1, 40):
        clock.sent(step_id, 512)
        us = 2_000_000 + step_id * 700_000
        assert clock.advance(us) is None
        clock.answered(step_id, us)


def test_a_batch_is_timed_from_when_it_is_the_oldest() -> None:
    clock = measured((1, 10))
    clock.sent(10, 1)
    clock.sent(11, 1)
    assert clock.advance(FLOOR_US) is None
    clock.answered(10, 10)
    assert clock.advance(FLOOR_US) is None
    assert clock.advance(1) is not None


def test_an_attach_begins_anew_and_another_boot_has_to_warm_up() -> None:
    clock = measured((1, 10))
    clock.sent(10, 1)
    clock.advance(FLOOR_US)
    clock.restart(is_same_boot=True)
    assert clock.advance(FLOOR_US) is None and clock.limit_us(1) == FLOOR_US
    clock.restart(is_same_boot=False)
    clock.restart(is_same_boot=True)
    assert clock.limit_us(1) == COLD_FLOOR_US
    clock.sent(1, 1)
    clock.answered(1, 10)
    assert clock.limit_us(1) == FLOOR_US


def test_a_batch_has_the_time_of_both_where_prompts_may_join_it() -> None:
    clock = StepClock()
    clock.sent(1, 100)
    clock.answered(1, 10_000_000)  # 0.1 s a position
    clock.sent(2, 1)
    clock.sent(3, 511, may_join=True)
    assert clock.advance(200_000_000) is None
    assert clock.advance(100_000_000) is not None  # 5 times 51.2 s


def test_what_has_no_time_of_its_own_shares_that_of_the_next() -> None:
    clock = StepClock()
    clock.sent(1, 511)
    clock.sent(2, 1, may_join=True)
    clock.answered(1, 0)
    clock.answered(2, 51_200_000)
    assert clock.limit_us(1000) == 5 * 100_000_000
    clock.sent(3, 5)
    clock.answered(3, 0)
    clock.restart(is_same_boot=True)
    clock.sent(4, 1)
    clock.answered(4, 100_000)
    assert clock.limit_us(1000) == 5 * 100_000_000
