"""A few kills at random moments in a pool that is too small: preemption and eviction meet every kind of loss."""

import sys

import pytest

from tests.chaos.campaign import Campaign
from tests.chaos.scenarios import SCENARIOS
from tests.chaos.setups import tight


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_streams_survive_random_kills(seed: int) -> None:
    with Campaign(tight(32), lambda text: print(text, file=sys.stderr, flush=True), seed, random_kills=10) as campaign:
        outcome = campaign.play(SCENARIOS["random-kills"])
    assert outcome.is_clean, "\n".join(outcome.complaints)
