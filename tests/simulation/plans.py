"""Plans of faults, drawn from the seed: some at random, or a story in which one prepares the next."""

import random
from dataclasses import dataclass

from tests.simulation.faults import Fault

SECOND = 1_000_000


@dataclass(frozen=True)
class Step:
    """One fault of a story: one of `kinds`, so long after the one before, for so long (microseconds, from and to)."""

    kinds: tuple[str, ...]
    after: tuple[int, int]
    duration: tuple[int, int]


KINDS: dict[str, tuple[str, ...]] = {
    "scheduler": ("drain leader", "kill leader", "kill scheduler", "pause leader", "pause scheduler", "break session"),
    "gateway": ("drain gateway", "kill gateway", "pause gateway", "break session", "break call"),
    "worker": ("drain worker", "kill worker", "pause worker", "break worker", "hang worker"),
    "store": ("restart store", "empty store", "older store", "full store", "pause store", "break store"),
    "cut": (
        *("cut leader worker", "cut leader store", "cut scheduler store", "cut scheduler gateway", "cut client gateway"),
        *("slow leader gateway", "slow leader worker", "slow leader store"),
    ),
}

_SHORT, _LONG = (10_000, 400_000), (1_200_000, 3_000_000)
_STORE_TROUBLE = ("pause store", "full store", "cut leader store", "break store", "slow leader store")

STORIES: dict[str, tuple[tuple[Step, ...], ...]] = {
    # The store lags behind, and then somebody else has to go on from it.
    "lag": (
        (
            Step(_STORE_TROUBLE, (0, SECOND), (300_000, 900_000)),
            Step(("kill leader", "pause leader"), (50_000, 900_000), _LONG),
        ),
        (Step(("pause store",), (0, SECOND), (550_000, 900_000)), Step(("kill leader",), (900_000, 1_300_000), _LONG)),
        (Step(("pause store",), (0, SECOND), (700_000, 900_000)), Step(("kill leader",), (520_000, 690_000), _LONG)),
        (Step(("older store",), (0, SECOND), (10_000, 100_000)), Step(("kill leader",), (0, 300_000), _LONG)),
        (Step(("kill leader",), (0, SECOND), _LONG), Step(("older store",), (0, SECOND), _SHORT)),
    ),
    # A leader that others think is gone.
    "stale": (
        (
            Step(("cut leader store",), (0, SECOND), (2_000_000, 3_000_000)),
            Step(("slow leader gateway",), (300_000, 900_000), (1_500_000, 2_500_000)),
            Step(("slow leader gateway",), (0, 50_000), (1_500_000, 2_500_000)),
        ),
        (
            Step(("cut leader store",), (0, SECOND), (2_500_000, 3_000_000)),
            Step(("cut leader worker",), (0, 300_000), (2_500_000, 3_000_000)),
            Step(("cut leader worker",), (0, 50_000), (2_500_000, 3_000_000)),
            Step(("break session",), (1_400_000, 1_900_000), _SHORT),
            Step(("break session",), (0, 100_000), _SHORT),
        ),
        (Step(("pause leader",), (0, SECOND), _LONG), Step(("pause gateway", "break session"), (0, SECOND), _SHORT)),
    ),
    # Requests change workers, and then somebody else takes them all over.
    "moved": (
        (
            Step(("cut leader worker", "pause worker"), (0, SECOND), (1_500_000, 2_500_000)),
            Step(("kill leader", "drain leader"), (1_050_000, 1_900_000), _LONG),
        ),
        (Step(("break worker", "kill worker"), (0, SECOND), _SHORT), Step(("kill leader",), (0, 300_000), _LONG)),
    ),
    # Clients come back elsewhere, while their gateway still speaks for them.
    "returns": (
        (
            Step(("pause gateway", "slow leader gateway", "cut leader gateway"), (0, SECOND), (300_000, 900_000)),
            Step(("break call",), (0, 300_000), _SHORT),
            Step(("break call",), (0, 100_000), _SHORT),
            Step(("break call",), (0, 300_000), _SHORT),
        ),
        (
            Step(("drain gateway", "kill gateway"), (0, SECOND), _SHORT),
            Step(("pause gateway", "drain gateway"), (0, SECOND), (300_000, 900_000)),
        ),
    ),
}

PLANS = ("none", *KINDS, *STORIES, "all")
"""What may be planned."""


def draw_faults(rng: random.Random, plan: str, begin: int) -> tuple[Fault, ...]:
    """The faults of one run."""
    if plan == "none":
        return ()
    if plan in STORIES:
        return _story(rng, rng.choice(STORIES[plan]), begin)
    if plan in KINDS:
        return _some(rng, KINDS[plan], begin)
    if rng.random() < 0.4:
        return _story(rng, rng.choice(STORIES[rng.choice(list(STORIES))]), begin)
    return _some(rng, tuple(kind for kinds in KINDS.values() for kind in kinds), begin)


def _some(rng: random.Random, kinds: tuple[str, ...], begin: int) -> tuple[Fault, ...]:
    """A few faults, some of them close to each other, often the same few kinds again."""
    if rng.random() < 0.5:
        kinds = tuple(rng.choice(kinds) for _ in range(rng.choice((1, 2, 2, 3))))
    faults = []
    at = begin + rng.randrange(SECOND)
    for _ in range(rng.choice((1, 2, 2, 3, 4, 5))):
        duration = rng.choice((rng.randrange(10_000, 300_000), rng.randrange(300_000, 3 * SECOND)))
        faults.append(Fault(at, rng.choice(kinds), rng.randrange(1 << 16), duration))
        at += rng.choice((rng.randrange(60_000), rng.randrange(300_000), rng.randrange(2 * SECOND)))
    return tuple(faults)


def _story(rng: random.Random, steps: tuple[Step, ...], begin: int) -> tuple[Fault, ...]:
    faults = []
    at = begin
    for step in steps:
        at += rng.randrange(*step.after)
        faults.append(Fault(at, rng.choice(step.kinds), rng.randrange(1 << 16), rng.randrange(*step.duration)))
    return tuple(faults)
