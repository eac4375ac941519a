"""How many values fell into which range."""

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts by upper bound, as Prometheus has them. `counts[n]` are the values above `bounds[n - 1]` and not above `bounds[n]`; the last are
    those above all bounds. Never less than before."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        assert list(bounds) == sorted(set(bounds)), "bounds ascend"
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count `value`, so many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def num_values(self) -> int:
        """Values counted."""
        return sum(self.counts)
