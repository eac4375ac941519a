"""Whether a worker takes too long over a batch. A pure clock, moved by its owner, for one worker."""

from collections import deque
from dataclasses import dataclass

SLACK = 5
"""A step may take this many times its predicted time."""

FLOOR_US = 10_000_000
"""No step is overdue before this: a machine that swaps, or computes for others too, is slow and not hung."""

COLD_FLOOR_US = 60_000_000
"""The same for the first step of a boot, which touches all weights and compiles what has to be compiled."""

UNMEASURED_US = 900_000_000
"""What a step may take before any was measured: a large model on a slow CPU computes a full batch for minutes."""

RATES_MAX = 32
"""Steps whose pace counts: the slowest of them predicts the next, so that neither short steps nor long contexts look like a hang."""


@dataclass(frozen=True, slots=True)
class Overdue:
    """The oldest batch in flight has taken longer than `limit_us`."""

    step_id: int
    positions: int
    elapsed_us: int
    limit_us: int

    def __str__(self) -> str:
        return (
            f"step {self.step_id} of {self.positions} positions has taken {self.elapsed_us / 1e6:.1f} s, at most "
            f"{self.limit_us / 1e6:.1f} s were expected"
        )


class StepClock:
    """Predicts what a batch takes from the slowest pace, in microseconds per position, of the last few batches."""

    def __init__(self) -> None:
        self._paces: deque[float] = deque(maxlen=RATES_MAX)
        self._in_flight: deque[tuple[int, int, bool]] = deque()  # (step id, positions, may join the one before)
        self._untimed = 0  # positions of answered batches whose time is the next one's
        self._elapsed_us = 0  # of the oldest
        self._is_cold = True

    def restart(self, is_same_boot: bool) -> None:
        """Nothing is in flight any more; another boot has to warm up."""
        self._in_flight.clear()
        self._elapsed_us = self._untimed = 0
        self._is_cold |= not is_same_boot

    def sent(self, step_id: int, positions: int, *, may_join: bool = False) -> None:
        """A batch has left; it runs after those before it, or together with the last of them where it `may_join` that."""
        self._in_flight.append((step_id, positions, may_join))

    def answered(self, step_id: int, compute_us: int) -> None:
        """The output of a batch has come, which the worker computed in `compute_us` (0: together with the next, whose time it is)."""
        while self._in_flight and self._in_flight[0][0] <= step_id:
            self._untimed += self._in_flight.popleft()[1]
            self._elapsed_us = 0
        if self._untimed and compute_us > 0:
            self._is_cold = False
            self._paces.append(compute_us / self._untimed)
            self._untimed = 0

    def advance(self, us: int) -> Overdue | None:
        """Time has passed. Says whether the oldest batch in flight is overdue now."""
        if not self._in_flight:
            return None
        self._elapsed_us += us
        step_id, positions, _ = self._in_flight[0]
        if len(self._in_flight) > 1 and self._in_flight[1][2]:
            positions += self._in_flight[1][1]
        limit_us = self.limit_us(positions)
        return Overdue(step_id, positions, self._elapsed_us, limit_us) if self._elapsed_us > limit_us else None

    def limit_us(self, positions: int) -> int:
        """The longest that a batch of so many positions may take."""
        if not self._paces:
            return UNMEASURED_US
        return max(COLD_FLOOR_US if self._is_cold else FLOOR_US, int(SLACK * max(self._paces) * positions))
