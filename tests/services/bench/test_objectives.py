"""Objectives: how they are written, and which answers meet them."""

import pytest
from outcomes import answered

from services.bench.objectives import Objective, parse_objective


@pytest.mark.parametrize(
    ("text", "is_met"),
    [("ttft:100", True), ("ttft:99", False), ("tpot:50", True), ("tpot:49.9", False), ("e2el:200", True), ("e2el:199", False)],
)
def test_an_answer_meets_what_it_is_not_slower_than(text: str, is_met: bool) -> None:
    """Sent at 0 s; tokens at 100, 150 and 200 ms."""
    outcome = answered(0, 0.0, [0.1, 0.15, 0.2])
    assert parse_objective(text).is_met(outcome) is is_met


def test_one_token_has_no_time_per_token() -> None:
    assert Objective("tpot", 1.0).is_met(answered(0, 0.0, [5.0]))


@pytest.mark.parametrize("text", ["", "ttft", "ttft:", "ttft:0", "ttft:-1", "ttft:nan", "ttft:inf", "itl:5", "tpot:fast"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="ttft, tpot, e2el"):
        parse_objective(text)
