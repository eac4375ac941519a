"""Every scenario of `make chaos` as a test: `pytest -m chaos tests/chaos`. Takes most of an hour, so no other selection has it."""

import sys
from collections.abc import Iterator

import pytest

from tests.chaos.campaign import Campaign
from tests.chaos.run import full_plan
from tests.chaos.scenarios import SCENARIOS
from tests.chaos.setups import SETUPS

PLAYED = [(setup.name, scenario.name) for setup, scenarios in full_plan() for scenario in scenarios]


@pytest.fixture(scope="module")
def campaign(request: pytest.FixtureRequest) -> Iterator[Campaign]:
    """One for all scenarios of a setup."""

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    with Campaign(SETUPS[request.param](), say) as opened:
        yield opened


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("campaign", "name"), PLAYED, indirect=["campaign"], ids=map(":".join, PLAYED))
def test_nothing_is_lost(campaign: Campaign, name: str) -> None:
    outcome = campaign.play(SCENARIOS[name])
    print(outcome.line())
    assert outcome.is_clean, "\n".join(outcome.complaints)
