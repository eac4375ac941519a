"""Positions that rows had for drafts and that came to nothing, until the scheduler knows of them."""

from collections import deque

import numpy as np


class UnusedRoom:
    """By slot, and by the step whose row had the room. A batch's `context_lens` count the room of every step behind its `seen_step` as used,
    so this is what they are too high by."""

    def __init__(self, num_slots: int) -> None:
        self._totals = np.zeros(num_slots, np.int64)
        self._steps: deque[tuple[int, np.ndarray, np.ndarray]] = deque()  # (step, slots, positions), oldest first

    def note(self, step_id: int, slots: np.ndarray, positions: np.ndarray) -> None:
        """In this step so many positions of these slots came to nothing; int64 `[R]` both, a slot comes at most once."""
        some = positions > 0
        if some.any():
            self._steps.append((step_id, slots[some], positions[some]))
            self._totals[slots[some]] += positions[some]

    def since(self, step_id: int) -> np.ndarray:
        """Positions that came to nothing in steps after this one, int64 `[num_slots]`, the caller's."""
        totals = self._totals.copy()
        for step, slots, positions in self._steps:
            if step <= step_id:
                totals[slots] -= positions
        return totals

    def forget_until(self, step_id: int) -> None:
        """Steps up to this one are known to the scheduler."""
        while self._steps and self._steps[0][0] <= step_id:
            _, slots, positions = self._steps.popleft()
            self._totals[slots] -= positions

    def forget_slot(self, slot: int) -> None:
        """The slot is given up, or somebody else's from now on."""
        if self._totals[slot]:
            self._totals[slot] = 0
            for _, slots, positions in self._steps:
                positions[slots == slot] = 0
