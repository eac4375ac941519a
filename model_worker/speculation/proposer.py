"""The port to whatever guesses the next tokens of sequences."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from model_worker.slot_table import SlotTable


@dataclass(frozen=True, slots=True, eq=False)
class Drafts:
    """Drafts of R rows: `counts` int64 `[R]`; `token_ids` int32 `[R, W]`, W at least the largest count, -1 behind a row's count."""

    counts: np.ndarray
    token_ids: np.ndarray

    @classmethod
    def none(cls, num_rows: int) -> "Drafts":
        """No draft for anybody."""
        return cls(np.zeros(num_rows, np.int64), np.empty((num_rows, 0), np.int32))

    def of(self, rows: np.ndarray) -> "Drafts":
        """Those of some rows (indices or bool), in this order."""
        return Drafts(self.counts[rows], self.token_ids[rows])


class Proposer(Protocol):
    """Guesses. A wrong draft costs its position in one step and changes no token, so nothing has to be remembered about a guess."""

    def propose(self, slots: np.ndarray, rooms: np.ndarray, table: SlotTable) -> Drafts:
        """Up to `rooms[i]` >= 0 tokens of the vocabulary to follow the ids of `slots[i]`; both int64 `[R]`, a slot comes at most once.

        Called at the beginning of a step, once for all rows that have room: `table` holds every token sampled until then, and only reads
        of it are allowed.
        """
        ...
