"""The figures of a level, against numpy, the standard library and plain counting."""

import json
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from outcomes import answered, failed, interrupted

from services.bench.figures import Level, concurrency_peak, figures_of, spread_of
from services.bench.objectives import parse_objective
from services.bench.outcome import Outcome

times = st.floats(0, 1e6)


@given(st.lists(times, min_size=1, max_size=60))
def test_a_spread_is_that_of_numpy_and_of_statistics(values: list[float]) -> None:
    spread = spread_of(values)
    assert spread is not None
    assert spread.p50 == pytest.approx(statistics.median(values))
    for percentile in (50, 90, 95, 99):
        assert getattr(spread, f"p{percentile}") == pytest.approx(np.percentile(values, percentile))
    assert spread.mean == pytest.approx(statistics.fmean(values)) and spread.max == max(values)


def test_values_that_are_not_there_do_not_count() -> None:
    assert spread_of([None, 4.0, None]) == spread_of([4.0])
    assert spread_of([None]) is None and spread_of([]) is None


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), max_size=20))
def test_the_peak_is_the_most_that_overlap(spans: list[tuple[int, int]]) -> None:
    outcomes = [failed(index, start, start + length, "X") for index, (start, length) in enumerate(spans)]
    moments = [sum(item.sent_s <= at < item.end_s for item in outcomes) for at in range(41)]
    assert concurrency_peak(outcomes) == max(moments)


LEVEL = Level(
    "2 requests/s",
    2.0,
    began_s=100.0,
    outcomes=(
        answered(0, 100.5, [101.0, 101.25, 102.0], arrival_s=100.5, queue_ms=5.0),
        answered(1, 101.0, [103.0], arrival_s=100.75),
        failed(2, 101.5, 101.6, "RESOURCE_EXHAUSTED", "full"),
        failed(3, 101.5, 104.0, "UNAVAILABLE"),
        failed(4, 101.5, 101.7, "RESOURCE_EXHAUSTED", "still full"),
        interrupted(5, 101.55, 104.0),
    ),
    num_cut=3,
    num_skipped=4,
    client_cpu_s=0.002,
)


def test_counts_and_rates_are_over_all_of_the_level() -> None:
    figures = figures_of(LEVEL)
    assert figures.duration_s == 4.0
    assert (figures.num_ok, figures.failed) == (2, {"RESOURCE_EXHAUSTED": 2, "UNAVAILABLE": 1})
    assert (figures.num_failed, figures.num_rejected, figures.num_interrupted) == (3, 2, 1)
    assert (figures.num_cut, figures.num_skipped) == (3, 4)
    assert (figures.input_tokens, figures.cached_tokens, figures.output_tokens) == (200, 50, 4)
    assert (figures.requests_per_s, figures.input_tokens_per_s, figures.output_tokens_per_s) == (0.5, 50.0, 1.0)
    assert figures.concurrency_peak == 6
    assert figures.client_cpu == pytest.approx(0.0005) and figures.client_token_us == pytest.approx(500)
    assert figures.messages == {"RESOURCE_EXHAUSTED": "full", "UNAVAILABLE": ""}


def test_measures_are_those_of_whole_answers() -> None:
    figures = figures_of(LEVEL)
    assert figures.ttft_ms == spread_of([500.0, 2000.0])
    assert figures.tpot_ms == spread_of([500.0])
    assert figures.itl_ms == spread_of([250.0, 750.0])
    assert figures.e2el_ms == spread_of([1500.0, 2000.0])
    assert figures.queue_ms == spread_of([5.0, 1.0])
    assert figures.lag_ms == spread_of([0.0, 250.0])


def test_goodput_counts_what_meets_every_objective() -> None:
    assert figures_of(LEVEL).goodput_per_s is None
    assert figures_of(LEVEL, [parse_objective("ttft:500")]).goodput_per_s == 0.25
    both = figures_of(LEVEL, [parse_objective("ttft:2000"), parse_objective("tpot:499")])
    assert (both.goodput_per_s, both.goodput_share) == (0.25, 0.2)


def test_a_level_in_which_nothing_came_to_an_end_has_figures() -> None:
    figures = figures_of(Level("8 at once", 8, 5.0, [interrupted(index, 5.0, 7.0) for index in range(8)]))
    assert (figures.duration_s, figures.requests_per_s, figures.ttft_ms, figures.concurrency_peak) == (2.0, 0.0, None, 8)
    assert (figures.num_interrupted, figures.num_failed, figures.messages) == (8, 0, {})


def test_a_level_of_nothing_has_figures() -> None:
    figures = figures_of(Level("8 at once", 8, 5.0, ()))
    assert (figures.duration_s, figures.requests_per_s, figures.ttft_ms, figures.concurrency_peak) == (0.0, 0.0, None, 0)


def test_figures_are_json_and_an_infinite_rate_is_no_number() -> None:
    told = figures_of(Level("all at once", math.inf, 100.0, LEVEL.outcomes)).as_json()
    assert json.loads(json.dumps(told, allow_nan=False))["load_value"] is None
    assert told["ttft_ms"]["p50"] == 1250.0 and told["failed"] == {"RESOURCE_EXHAUSTED": 2, "UNAVAILABLE": 1}


def test_a_request_is_json_with_times_from_the_start() -> None:
    assert LEVEL.outcomes[0].as_json(100.0) == {
        "index": 0,
        "status": "OK",
        "sent_s": 0.5,
        "arrival_s": 0.5,
        "end_s": 2.0,
        "retries": 0,
        "ttft_ms": 500.0,
        "itl_ms": [250.0, 750.0],
        "tpot_ms": 500.0,
        "e2el_ms": 1500.0,
        "input_tokens": 100,
        "cached_tokens": 25,
        "output_tokens": 3,
        "queue_ms": 5.0,
        "server_ttft_ms": 2.0,
        "num_preemptions": 0,
    }
    expected = {"index": 2, "status": "RESOURCE_EXHAUSTED", "sent_s": 1.5, "message": "full", "end_s": 1.6, "retries": 0}
    assert LEVEL.outcomes[2].as_json(100.0) == expected


def test_an_answer_without_a_token_is_none() -> None:
    assert not Outcome(0, 0.0, 1.0, "OK").is_ok
