"""Drafts that are made one after the other, for several rows at once."""

import numpy as np

from model_worker.sampler import NO_TOKEN
from model_worker.slot_table import SlotTable
from model_worker.speculation.proposer import Drafts


class DraftRows:
    """Of R rows, with room for W drafts in each; begins without any."""

    def __init__(self, num_rows: int, width: int) -> None:
        self._counts = np.zeros(num_rows, np.int64)
        self._token_ids = np.full((num_rows, width), NO_TOKEN, np.int32)
        self._odds: np.ndarray | None = None

    @property
    def drafts(self) -> Drafts:
        """Those made so far."""
        return Drafts(self._counts, self._token_ids, self._odds)

    def add(self, rows: np.ndarray, token_ids: np.ndarray, odds: np.ndarray | None) -> np.ndarray:
        """One more for each of some rows (int64 `[r]`), as `DraftDraws` draws them; returns which rows have got one, bool `[r]`."""
        has_token: np.ndarray = token_ids != NO_TOKEN
        given = rows[has_token]
        places = self._counts[given]
        self._token_ids[given, places] = token_ids[has_token]
        if odds is not None:
            if self._odds is None:
                self._odds = np.zeros((*self._token_ids.shape, odds.shape[1]), np.float32)
            self._odds[given, places] = odds[has_token]
        self._counts[given] += 1
        return has_token

    def place(self, rows: np.ndarray, slots: np.ndarray, table: SlotTable) -> None:
        """Put the drafts of some rows, all equally many, behind the known ids of their slots."""
        count = int(self._counts[rows[0]])
        table.place_drafts(slots, np.full(len(rows), count), self._token_ids[rows, :count].reshape(-1))
