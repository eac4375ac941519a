"""Which pauses of an answer count as alone, which as beside prompts."""

import pytest

from tests.benchmarks.prompts_beside import SETTLING_TOKENS, Answer, pauses_of


def _answer(settled_s: float, *later_s: float) -> Answer:
    return Answer([settled_s] * (SETTLING_TOKENS + 1) + list(later_s))


def test_pauses_count_where_they_end() -> None:
    answers = [_answer(1.0, 1.5, 2.0, 4.0, 5.0, 9.0), _answer(1.2, 1.7, 6.0)]
    pauses = pauses_of(answers, 3.0, 6.0, [1000.0, 3000.0])
    assert (pauses.alone.p50, pauses.alone.max) == (pytest.approx(500.0), pytest.approx(500.0))
    assert (pauses.beside.p50, pauses.beside.max) == (pytest.approx(2000.0), pytest.approx(4300.0)), (
        "9.0 is after the last prompt"
    )
    assert pauses.ttft.p50 == 2000.0
    assert pauses.ratio == pytest.approx(pauses.beside.p99 / 2000) and pauses.ratio_to_alone == pytest.approx(
        pauses.beside.p99 / 500
    )


def test_until_all_answers_stream_nothing_counts() -> None:
    early, late = _answer(0.0, 0.9, 2.1, 2.5), _answer(2.0, 2.4, 3.5)
    assert pauses_of([early, late], 3.0, 4.0, [1.0]).alone.max == pytest.approx(1200.0), "0.9 is before the late one streams"
