"""Random generators that follow from one seed: what is drawn for one thing does not depend on how much was drawn for others."""

from enum import IntEnum

import numpy as np


class Purpose(IntEnum):
    """What a generator is for."""

    ARRIVALS = 0
    LENGTHS = 1
    PROMPT = 2
    SHARED_PREFIX = 3
    TRACE_BLOCK = 4


def generator(seed: int, purpose: Purpose, index: int = 0) -> np.random.Generator:
    """The generator for the thing number `index` of its kind. `seed` and `index` are not negative."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(purpose, index)))
