"""Arrivals of an open loop: their rate, their distribution, and that a seed fixes them."""

import math
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.bench.arrivals import arrivals_s


def first(count: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    return list(islice(arrivals_s(rate, burstiness, seed), count))


@settings(max_examples=50)
@given(st.floats(0.01, 1e4), st.floats(0.05, 50), st.integers(0, 2**64))
def test_times_never_go_back_and_follow_from_the_seed(rate: float, burstiness: float, seed: int) -> None:
    times = first(50, rate, burstiness, seed)
    assert times == sorted(times) and times[0] >= 0
    assert times == first(50, rate, burstiness, seed)
    assert times != first(50, rate, burstiness, seed + 1)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_of_the_rate_and_the_spread_of_the_shape(burstiness: float) -> None:
    """A gamma distribution of shape k has a variance of 1/k of its squared mean."""
    gaps = np.diff([0.0, *first(40_000, 5.0, burstiness)])
    assert gaps.mean() == pytest.approx(1 / 5, rel=0.03)
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(1 / burstiness, rel=0.06)


def test_a_poisson_process_has_as_many_arrivals_a_second_as_a_poisson_variable() -> None:
    counts = np.bincount(np.array(first(40_000, 8.0), dtype=int))[:-1]
    assert counts.mean() == pytest.approx(8, rel=0.03) and counts.var() == pytest.approx(8, rel=0.1)


def test_an_infinite_rate_has_all_at_once() -> None:
    assert first(1000, math.inf) == [0.0] * 1000
