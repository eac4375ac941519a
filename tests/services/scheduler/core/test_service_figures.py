"""Histograms, and how the time between tokens is counted a step at a time."""

import pytest

from services.scheduler.core.histogram import Histogram
from services.scheduler.core.service_figures import ServiceFigures, TokenPace


def test_a_value_counts_below_its_bound():
    histogram = Histogram((1, 2, 5))
    for value in (0.5, 1, 1.5, 5, 6):
        histogram.add(value)
    histogram.add(2, times=3)
    assert histogram.counts == [2, 4, 1, 1]
    assert histogram.num_values == 8
    assert histogram.total == pytest.approx(20)


def gaps(figures):
    """(sum of the gaps counted so far in ms, how many)."""
    return round(figures.inter_token_s.total * 1000), figures.inter_token_s.num_values


def test_who_decodes_on_waited_since_the_last_decode_and_who_is_new_since_its_first_token():
    figures, pace = ServiceFigures(), TokenPace()
    figures.step(pace, 0, 30, 2, 0, 1_000_000)  # two prompts give their first tokens
    assert gaps(figures) == (0, 0)
    figures.step(pace, 2, 0, 2, 0, 1_010_000)
    assert gaps(figures) == (20, 2)
    figures.step(pace, 2, 9, 3, 0, 1_030_000)  # both decode beside a third one's prompt
    assert gaps(figures) == (60, 4)
    figures.step(pace, 0, 50, 0, 0, 1_050_000)  # a prompt alone, not at its end: nobody gets a token
    figures.step(pace, 3, 0, 3, 0, 1_080_000)
    assert gaps(figures) == (60 + 3 * 50, 7)


def test_an_idle_time_is_no_gap():
    figures, pace = ServiceFigures(), TokenPace()
    figures.step(pace, 0, 5, 1, 0, 1_000_000)
    figures.step(pace, 1, 0, 1, 0, 1_010_000)
    pace.leave()
    figures.step(pace, 0, 5, 1, 0, 9_000_000)
    figures.step(pace, 1, 0, 1, 0, 9_020_000)
    assert gaps(figures) == (30, 2)


def test_a_worker_that_came_with_running_requests_has_no_gap_to_count():
    figures = ServiceFigures()
    figures.step(TokenPace(), 4, 0, 4, 0, 5_000_000)
    assert gaps(figures) == (0, 0)


def test_steps_count_by_phase():
    figures, pace = ServiceFigures(), TokenPace()
    figures.step(pace, 0, 100, 1, 40_000, 1)
    figures.step(pace, 1, 0, 1, 3_000, 2)
    figures.step(pace, 1, 7, 2, 9_000, 3)
    figures.step(pace, 1, 0, 1, 0, 4)  # together with the next
    assert {phase: one.num_values for phase, one in figures.step_s.items()} == {"decode": 1, "prefill": 1, "mixed": 1}
    assert figures.step_s["mixed"].total == pytest.approx(0.009)
    assert figures.step_tokens.total == 101 + 1 + 9 + 1
    figures.step(pace, 0, 7, 1, 8_000, 5)
    assert figures.step_s["mixed"].total == pytest.approx(0.017) and figures.step_s["prefill"].num_values == 1
