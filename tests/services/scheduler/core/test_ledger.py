"""Counting what is committed, computed and in flight."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.ledger import Ledger


def test_a_prefill_in_chunks_and_two_decodes_in_flight() -> None:
    ledger = Ledger(5, [1, 2, 3, 4, 5])
    assert ledger.num_remaining == 5
    assert ledger.schedule(3) is False
    assert (ledger.scheduled_len, ledger.num_remaining) == (3, 2)
    assert ledger.schedule(2) is True
    assert ledger.num_remaining == 1, "the placeholder's position"
    assert ledger.schedule(1) is True
    ledger.commit(3, ())
    ledger.commit(2, (9,))
    assert (ledger.computed_len, ledger.positions_in_flight, ledger.token_ids[5:]) == (5, 1, [9])
    ledger.commit(1, (8,))
    assert (ledger.computed_len, ledger.positions_in_flight, ledger.output_len) == (6, 0, 2)


def test_more_than_what_is_left_cannot_be_scheduled() -> None:
    ledger = Ledger(2, [1, 2])
    with pytest.raises(AssertionError):
        ledger.schedule(3)


def test_what_was_not_in_flight_cannot_come_back() -> None:
    ledger = Ledger(2, [1, 2])
    ledger.schedule(1)
    with pytest.raises(AssertionError):
        ledger.commit(2, ())


def test_a_restart_keeps_tokens_and_forgets_what_was_in_flight() -> None:
    ledger = Ledger(2, [1, 2])
    ledger.schedule(2)
    ledger.commit(2, (7,))
    ledger.schedule(1)
    ledger.restart(0)
    assert (ledger.token_ids, ledger.scheduled_len, ledger.num_remaining) == ([1, 2, 7], 0, 3)


@given(st.integers(1, 9), st.lists(st.integers(1, 5), max_size=30), st.integers(1, 3))
def test_counts_never_go_below_what_is_true(prompt_len: int, chunks: list[int], depth: int) -> None:
    """Invariant of case 43: whatever is scheduled and answered, nothing goes negative and computed stays behind the tokens."""
    ledger, flying = Ledger(prompt_len, list(range(prompt_len))), []
    for chunk in chunks:
        count = min(chunk, ledger.num_remaining)
        flying.append((count, ledger.schedule(count)))
        if len(flying) == depth:
            done, samples = flying.pop(0)
            ledger.commit(done, (1,) if samples else ())
        assert ledger.positions_in_flight == sum(count for count, _ in flying)
        assert 0 <= ledger.computed_len < ledger.num_tokens <= ledger.scheduled_len + ledger.num_remaining
        num_samples = sum(samples for _, samples in flying)
        assert num_samples == max(0, ledger.scheduled_len - ledger.num_tokens + 1), "placeholders follow from the lengths"
