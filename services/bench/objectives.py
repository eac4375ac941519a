"""Service-level objectives: how long the parts of an answer may take. What meets all of them counts as goodput."""

import math
from dataclasses import dataclass

from services.bench.outcome import Outcome

MEASURES = ("ttft", "tpot", "e2el")
"""Time to first token, per output token after it, end to end."""


@dataclass(frozen=True, slots=True)
class Objective:
    """A measure of each request that is at most `limit_ms`."""

    measure: str
    limit_ms: float

    def is_met(self, outcome: Outcome) -> bool:
        """Whether an answer is that fast; one of a single token has no time per token, and is."""
        assert self.measure in MEASURES
        value_ms: float | None = getattr(outcome, f"{self.measure}_ms")
        return value_ms is None or value_ms <= self.limit_ms


def parse_objective(text: str) -> Objective:
    """`ttft:500`. Raises ValueError."""
    measure, _, limit = text.partition(":")
    try:
        limit_ms = float(limit)
    except ValueError:
        limit_ms = math.nan
    if measure not in MEASURES or not 0 < limit_ms < math.inf:
        raise ValueError(f"{text!r} is not one of {', '.join(MEASURES)}, a colon and milliseconds, as in ttft:500")
    return Objective(measure, limit_ms)
