"""Lengths: what may be written, and that what is drawn is it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.bench.lengths import EvenLengths, NormalLengths, parse_lengths


@given(st.integers(1, 5000), st.integers(0, 5000), st.integers(0, 2**32))
def test_a_range_gives_only_its_own_lengths(low: int, more: int, seed: int) -> None:
    lengths = parse_lengths(f"{low}-{low + more}")
    rng = np.random.default_rng(seed)
    assert all(low <= lengths.draw(rng) <= low + more for _ in range(20))


def test_both_ends_of_a_range_are_drawn() -> None:
    rng = np.random.default_rng(1)
    assert {parse_lengths("3-5").draw(rng) for _ in range(100)} == {3, 4, 5}


def test_a_mean_and_a_deviation_are_those_of_what_is_drawn() -> None:
    rng = np.random.default_rng(1)
    drawn = [parse_lengths("128:32").draw(rng) for _ in range(4000)]
    assert np.mean(drawn) == pytest.approx(128, abs=2) and np.std(drawn) == pytest.approx(32, abs=2)
    assert min(NormalLengths(2, 50).draw(rng) for _ in range(200)) == 1


def test_one_number_is_always_that() -> None:
    assert parse_lengths(" 7 ") == EvenLengths(7, 7) and parse_lengths("7").words == "7"
    assert (parse_lengths("7-9").words, parse_lengths("7:2").words) == ("7 to 9", "7 (+- 2)")


@pytest.mark.parametrize("text", ["", "0", "-3", "9-7", "0-4", "1.5", "many", "1:2:3", "99999999", "1-99999999"])
def test_anything_else_is_refused_with_what_was_given(text: str) -> None:
    with pytest.raises(ValueError, match="length"):
        parse_lengths(text)
