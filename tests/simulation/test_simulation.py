"""Short runs of the simulated system under every kind of fault; see `tests.simulation.run` for many, and for one step by step."""

import logging
from collections.abc import Iterator

import pytest
import structlog

from tests.simulation.plans import PLANS
from tests.simulation.run import replay_line
from tests.simulation.system import simulate

SEEDS = 30
"""Of each kind of fault."""


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    """The leaders' own log lines say nothing that a transcript does not."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


@pytest.mark.parametrize("faults", PLANS)
def test_nothing_is_lost(faults: str) -> None:
    for seed in range(SEEDS):
        outcome = simulate(seed, faults)
        assert outcome.failure is None, f"{outcome.failure}\n{replay_line(seed, faults)}"


def test_a_seed_replays_exactly() -> None:
    runs = [simulate(3, "all", is_traced=True) for _ in range(2)]
    assert runs[0].transcript == runs[1].transcript != []
