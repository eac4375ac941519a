"""Lengths in tokens, drawn at random: one number, normal around a mean, or even over a range."""

import re
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class EvenLengths:
    """Every length from `low` to `high`, both included, as likely as any other."""

    low: int
    high: int

    @property
    def words(self) -> str:
        """For people."""
        return str(self.low) if self.low == self.high else f"{self.low} to {self.high}"

    def draw(self, rng: np.random.Generator) -> int:
        """One length."""
        return int(rng.integers(self.low, self.high, endpoint=True))


@dataclass(frozen=True, slots=True)
class NormalLengths:
    """Normal, rounded, and at least 1."""

    mean: int
    deviation: int

    @property
    def words(self) -> str:
        """For people."""
        return f"{self.mean} (+- {self.deviation})"

    def draw(self, rng: np.random.Generator) -> int:
        """One length."""
        return max(1, round(rng.normal(self.mean, self.deviation)))


Lengths = EvenLengths | NormalLengths

LENGTH_MAX = 1 << 20
"""As `max_tokens` of the public API."""


def parse_lengths(text: str) -> Lengths:
    """`128`, `128:32` (mean and standard deviation) or `64-256`. Raises ValueError."""
    found = re.fullmatch(r"(\d+)(?:([:-])(\d+))?", text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a length: give 128, 128:32 (mean and standard deviation) or 64-256")
    first, sign, second = int(found[1]), found[2], int(found[3] or 0)
    if not 1 <= first <= LENGTH_MAX or second > LENGTH_MAX:
        raise ValueError(f"{text!r}: a length is 1 to {LENGTH_MAX}")
    if sign == ":":
        return NormalLengths(first, second)
    if sign is None:
        return EvenLengths(first, first)
    if second < first:
        raise ValueError(f"{text!r}: a range is from the smaller to the larger length")
    return EvenLengths(first, second)
