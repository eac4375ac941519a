"""Counts of the sequences of one worker that only decode, as columns by slot: a step is a few array operations for all of them."""

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from services.scheduler.core.row_index import Index, Rows, rows_of

Column: TypeAlias = npt.NDArray[np.int32]


class Lanes:
    """A sequence holds the lane of its slot while nothing of it is missing but the KV of its last token, and all that is in flight are
    rows of one position: each output then adds a token and a computed position. Its `Ledger` takes the lane and leaves it.

    int32 columns `[num_slots]`, valid in lanes that are held:
    - `num_tokens`: committed tokens, prompt included. One more than positions are computed.
    - `scheduled`: positions computed or in flight; where the next row begins.
    - `prompt_lens`, `caps` (a row is issued only for a position whose token is not the cap's).
    - `covered`: positions for which the table has blocks, and `last_blocks`, the last of these.
    - `full_at`: the `num_tokens` at which the next block is full.
    - `told`, `told_covered`: output tokens, and positions of the table, that the journal knows of.

    `version` changes when a lane is taken or left.
    """

    __slots__ = (
        "_ending_ids",
        "_num_ending",
        "block_size",
        "caps",
        "covered",
        "full_at",
        "last_blocks",
        "num_tokens",
        "prompt_lens",
        "scheduled",
        "told",
        "told_covered",
        "version",
    )

    def __init__(self, num_slots: int, vocab_size: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_tokens, self.scheduled, self.prompt_lens, self.caps = np.zeros((4, num_slots), np.int32)
        self.covered, self.last_blocks, self.full_at = np.zeros((3, num_slots), np.int32)
        self.told, self.told_covered = np.zeros((2, num_slots), np.int32)
        self.version = 0
        self._num_ending = np.zeros(vocab_size, np.int32)  # by id: how many lanes it may end
        self._ending_ids: dict[int, list[int]] = {}  # by slot

    def __len__(self) -> int:
        """How many are held."""
        return len(self._ending_ids)

    def take(self, slot: int, num_tokens: int, scheduled: int, prompt_len: int, cap: int, ending_ids: Iterable[int]) -> None:
        """Hold a lane. `ending_ids` has every id that may be the last one of its output. The columns of its table, and of what the journal
        knows, are the caller's to fill."""
        assert slot not in self._ending_ids, f"lane {slot} is held"
        self.num_tokens[slot], self.scheduled[slot] = num_tokens, scheduled
        self.full_at[slot] = (num_tokens - 1) // self.block_size * self.block_size + self.block_size + 1
        self.prompt_lens[slot], self.caps[slot] = prompt_len, cap
        highest = len(self._num_ending) - 1
        ids = list({min(token_id, highest) for token_id in ending_ids})
        self._num_ending[ids] += 1
        self._ending_ids[slot] = ids
        self.version += 1

    def leave(self, slot: int) -> int:
        """Hold a lane no longer; returns its `scheduled`."""
        self._num_ending[self._ending_ids.pop(slot)] -= 1
        self.version += 1
        return int(self.scheduled[slot])

    def has_table(self, slot: int, num_blocks: int, last_block: int) -> None:
        """The table of a sequence has so many blocks now."""
        self.covered[slot], self.last_blocks[slot] = num_blocks * self.block_size, last_block

    def grow(self, slots: Column, block_ids: list[int]) -> None:
        """The tables of these sequences have got a block each."""
        self.covered[slots] += self.block_size
        self.last_blocks[slots] = block_ids

    def append(self, index: Index, token_ids: Column) -> tuple[Column, list[int], Rows]:
        """Count one more token in each of these lanes, with these ids. Returns the new `num_tokens`, and the rows in which the token may be the
        last, and those in which it has made a block full; these count as seen to."""
        num_tokens = self.num_tokens[index]
        num_tokens += 1
        self.num_tokens[index] = num_tokens
        may_end = self._num_ending.take(token_ids, mode="clip") > 0
        may_end |= num_tokens >= self.caps[index]
        full_at = self.full_at[index]
        full = (num_tokens >= full_at).nonzero()[0]
        if len(full):
            full_at[full] += self.block_size
            self.full_at[index] = full_at
        return num_tokens, rows_of(may_end), full

    def append_one(self, slot: int) -> None:
        """Count one more token in a lane."""
        self.num_tokens[slot] += 1
        if self.num_tokens[slot] >= self.full_at[slot]:
            self.full_at[slot] += self.block_size
