"""Short runs of the simulated system under every kind of fault; see `tests.simulation.run` for many, and for one step by step."""

import logging
from collections.abc import Iterator

import pytest
import structlog

from tests.simulation.defects import DEFECTS
from tests.simulation.plans import PLANS
from tests.simulation.run import replay_line
from tests.simulation.system import Outcome, simulate

SEEDS = {"none": 5, "all": 50}
"""Of a plan of faults; 12 where it is not named."""

KEPT = [
    ("cut", 28),  # a Submit that was stuck on a gateway's earlier session took the request over from its next one
    ("returns", 944),  # a client that came back was sent the output cut by a stop string with the end from before the cut
]
"""Seeds that failed once. They mean something else whenever what is drawn from a seed changes: `defects` keeps the mistakes."""


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    """The leaders' own log lines say nothing that a transcript does not."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


@pytest.mark.parametrize("faults", PLANS)
def test_nothing_is_lost(faults: str) -> None:
    for seed in range(SEEDS.get(faults, 12)):
        assert_holds(simulate(seed, faults), faults)


def test_nothing_is_lost_though_blocks_are_swapped() -> None:
    outcomes = [simulate(seed, "all", swaps=True) for seed in range(20)]
    for outcome in outcomes:
        assert outcome.failure is None, f"{outcome.failure}\n{replay_line(outcome.seed, 'all', swaps=True)}"
    assert sum(outcome.num_swap_outs for outcome in outcomes) > 20


@pytest.mark.parametrize("faults", ["scheduler", "worker", "gateway", "all"])
def test_every_token_keeps_its_log_probabilities(faults: str) -> None:
    for seed in range(8):
        outcome = simulate(seed, faults, swaps=seed % 2 == 0, logprobs=True)
        assert outcome.failure is None, f"{outcome.failure}\n{replay_line(seed, faults, seed % 2 == 0, True)}"
        assert outcome.num_untold == 0, replay_line(seed, faults, seed % 2 == 0, True)


@pytest.mark.parametrize(("faults", "seed"), KEPT)
def test_what_failed_once_holds(faults: str, seed: int) -> None:
    assert_holds(simulate(seed, faults), faults)


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    defect = DEFECTS[name]
    defect.plant(monkeypatch)
    outcomes = (simulate(seed, defect.faults) for seed in range(defect.seeds))
    assert any(outcome.failure is not None for outcome in outcomes), f"not found in {defect.seeds} seeds"


def assert_holds(outcome: Outcome, faults: str) -> None:
    assert outcome.failure is None, f"{outcome.failure}\n{replay_line(outcome.seed, faults)}"


def test_a_seed_replays_exactly() -> None:
    runs = [simulate(3, "all", is_traced=True) for _ in range(2)]
    assert runs[0].transcript == runs[1].transcript != []
