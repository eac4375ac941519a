"""`make chaos QUICK=1` as a test: one kill of each role under load, nothing lost."""

import sys

import pytest

from tests.chaos.outcome import Outcome
from tests.chaos.run import play, quick_plan


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """All of it, played once."""
    played = play(quick_plan(), lambda text: print(text, file=sys.stderr, flush=True))
    return {outcome.scenario.name: outcome for outcome in played}


@pytest.mark.slow
@pytest.mark.timeout(900)  # the first one plays all
@pytest.mark.parametrize("name", [scenario.name for _, scenarios in quick_plan() for scenario in scenarios])
def test_a_kill_loses_nothing(outcomes: dict[str, Outcome], name: str) -> None:
    outcome = outcomes[name]
    assert outcome.is_clean, "\n".join(outcome.complaints)
    assert outcome.verdict.streams > 0
    assert outcome.pauses.max_s > 0, "no stream was under way at the kill"
