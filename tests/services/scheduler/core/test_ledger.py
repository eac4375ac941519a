"""Counting what is committed, computed and in flight."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.ledger import Ledger
from services.scheduler.core.tokens import Tokens


def test_a_prefill_in_chunks_and_two_decodes_in_flight() -> None:
    ledger = Ledger(Tokens(np.array([1, 2, 3, 4, 5], np.int32)))
    assert ledger.num_remaining == 5
    assert ledger.schedule(3) is False
    assert (ledger.scheduled_len, ledger.num_remaining) == (3, 2)
    assert ledger.schedule(2) is True
    assert ledger.num_remaining == 1, "the placeholder's position"
    assert ledger.schedule(1) is True
    ledger.commit(3, ())
    ledger.commit(2, (9,))
    assert (ledger.computed_len, ledger.positions_in_flight, ledger.token_ids.output.tolist()) == (5, 1, [9])
    ledger.commit(1, (8,))
    assert (ledger.computed_len, ledger.positions_in_flight, ledger.output_len) == (6, 0, 2)


def test_more_than_what_is_left_cannot_be_scheduled() -> None:
    ledger = Ledger(Tokens(np.array([1, 2], np.int32)))
    with pytest.raises(AssertionError):
        ledger.schedule(3)


def test_what_was_not_in_flight_cannot_come_back() -> None:
    ledger = Ledger(Tokens(np.array([1, 2], np.int32)))
    ledger.schedule(1)
    with pytest.raises(AssertionError):
        ledger.commit(2, ())


def test_a_restart_keeps_tokens_and_forgets_what_was_in_flight() -> None:
    ledger = Ledger(Tokens(np.array([1, 2], np.int32)))
    ledger.schedule(2)
    ledger.commit(2, (7,))
    ledger.schedule(1)
    ledger.restart(0)
    assert (ledger.token_ids, ledger.scheduled_len, ledger.num_remaining) == ([1, 2, 7], 0, 3)


@given(st.integers(1, 9), st.lists(st.integers(1, 5), max_size=30), st.integers(1, 3))
def test_counts_never_go_below_what_is_true(prompt_len: int, chunks: list[int], depth: int) -> None:
    """Invariant of case 43: whatever is scheduled and answered, nothing goes negative and computed stays behind the tokens."""
    ledger, flying = Ledger(Tokens(np.array(list(range(prompt_len)), np.int32))), []
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


def decoding(k: int, prompt_len: int = 5) -> Ledger:
    """A sequence whose prefill and first decode, with room for k drafts, are in flight."""
    ledger = Ledger(Tokens(np.array(list(range(prompt_len)), np.int32)))
    assert ledger.schedule(prompt_len) is True
    ledger.schedule_decode(1 + k)
    return ledger


@pytest.mark.parametrize(
    ("k", "num_rejected", "processed", "skipped"),
    [(0, 0, 1, 1), (1, 0, 2, 2), (1, 1, 1, 2), (3, 0, 4, 4), (3, 1, 3, 4), (3, 2, 2, 4), (3, 3, 1, 4)],
)
def test_a_step_adds_as_many_placeholders_as_atom_does(k: int, num_rejected: int, processed: int, skipped: int) -> None:
    """ATOM's table, output deferred: with every step a sequence gets `1 + k` placeholders where no output of it has come (skipped), and
    `1 + k - rejected` where one has (processed). Here no token is put in and taken out again: the lengths say the same."""
    ledger = Ledger(Tokens(np.array([1, 2, 3, 4, 5], np.int32)))
    ledger.schedule(5)
    before = ledger.scheduled_len
    ledger.schedule_decode(1 + k)
    assert ledger.scheduled_len - before == skipped, "no output of its prefill has come"
    ledger.commit(5, (6,))
    ledger.schedule_decode(1 + k)
    before = ledger.scheduled_len
    ledger.commit(1 + k, range(7, 8 + k - num_rejected), k)
    ledger.schedule_decode(1 + k)
    assert ledger.scheduled_len - before == processed
    assert ledger.num_placeholders == 2 * (1 + k), "1 + k for each batch in flight"


@pytest.mark.parametrize("k", [0, 1, 3])
def test_an_unfinished_prefill_chunk_has_no_placeholder(k: int) -> None:
    """ATOM: none for a partial prefill, whether its output has come or not."""
    ledger = Ledger(Tokens(np.array([1, 2, 3, 4, 5], np.int32)))
    ledger.schedule(2)
    assert ledger.num_placeholders == 0
    ledger.schedule(2)
    ledger.commit(2, ())
    assert ledger.num_placeholders == 0
    ledger.schedule(1)
    assert ledger.num_placeholders == 1
    ledger.schedule_decode(1 + k)
    assert ledger.num_placeholders == 2 + k


@pytest.mark.parametrize("k", [0, 1, 3])
def test_nothing_is_owed_once_the_output_of_every_batch_has_come(k: int) -> None:
    """ATOM without deferral: k places for drafts stay; here they come and go with the batch."""
    ledger = decoding(k)
    ledger.commit(5, (6,))
    ledger.commit(1 + k, (7,), k)
    assert (ledger.num_placeholders, ledger.drafts_in_flight, ledger.scheduled_len) == (0, 0, 6)


def test_preemption_takes_placeholders_and_rejected_drafts_and_keeps_the_tokens() -> None:
    """ATOM strips k + rejected tokens, and computes all that is left again."""
    ledger = decoding(3)
    ledger.commit(5, (6,))
    ledger.commit(4, (7, 8), 3)
    ledger.schedule_decode(4)
    ledger.restart(0)
    assert (ledger.num_tokens, ledger.num_remaining, ledger.num_placeholders, ledger.drafts_in_flight) == (8, 8, 0, 0)


def test_rejected_drafts_give_their_positions_back_to_the_batch_behind() -> None:
    ledger = decoding(3)
    ledger.commit(5, (6,))
    ledger.schedule_decode(4)
    assert (ledger.computed_len, ledger.scheduled_len, ledger.drafts_in_flight) == (5, 13, 6)
    ledger.commit(4, (7, 8), 3)  # one draft accepted of three
    assert (ledger.computed_len, ledger.scheduled_len, ledger.drafts_in_flight) == (7, 11, 3)
    ledger.commit(4, (9, 10, 11, 12), 3)
    assert (ledger.computed_len, ledger.scheduled_len, ledger.drafts_in_flight) == (11, 11, 0)
    assert ledger.token_ids.output.tolist() == [6, 7, 8, 9, 10, 11, 12]


@pytest.mark.parametrize("token_ids", [(), (7, 8, 9, 10, 11)])
def test_a_row_with_drafts_gives_one_token_at_least_and_one_more_for_each_at_most(token_ids: tuple[int, ...]) -> None:
    ledger = decoding(3)
    ledger.commit(5, (6,))
    with pytest.raises(AssertionError, match="of 3 drafts"):
        ledger.commit(4, token_ids, 3)


def test_an_end_in_the_middle_of_a_row_leaves_what_a_row_of_one_token_had_left() -> None:
    """Of the last token no KV counts, though it was computed as an accepted draft."""
    ledger = decoding(3)
    ledger.commit(5, (6,))
    ledger.commit(4, (7, 8, 9, 10), 3)
    ledger.cut(3)
    assert (ledger.token_ids.output.tolist(), ledger.computed_len) == ([6, 7, 8], 7)
    ledger.cut(3)
    assert (ledger.token_ids.output.tolist(), ledger.computed_len) == ([6, 7, 8], 7)
