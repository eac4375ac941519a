"""Counts of the sequences of one worker that only decode, as columns by slot: a step is a few array operations for all of them."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt


class Lanes:
    """A sequence holds the lane of its slot while nothing of it is missing but the KV of its last token, and all that is in flight are
    rows of one position: each output then adds a token and a computed position. Its `Ledger` takes the lane and leaves it.

    int32 columns `[num_slots]`, valid in lanes that are held:
    - `num_tokens`: committed tokens, prompt included. One more than positions are computed.
    - `scheduled`: positions computed or in flight; where the next row begins.
    - `prompt_lens`, `caps` (a row is issued only for a position whose token is not the cap's).
    - `edges`: from this `scheduled` on somebody has to look at the sequence before a row is issued: it needs a block, or is at its cap.
    - `marks`: from this `num_tokens` on somebody has to look at it after an output: a block is full, or the cap reached.

    `has_grown`, bool: the table may have a block that the journal has not been told of. `version` changes when a lane is taken or left.
    """

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self.num_tokens, self.scheduled, self.prompt_lens, self.caps, self.edges, self.marks = np.zeros(
            (6, num_slots), np.int32
        )
        self.has_grown = np.zeros(num_slots, np.bool_)
        self.version = 0
        self._num_ending = np.zeros(vocab_size, np.int32)  # by id: how many lanes it may end
        self._ending_ids: dict[int, npt.NDArray[np.intp]] = {}  # by slot

    def __len__(self) -> int:
        """How many are held."""
        return len(self._ending_ids)

    def take(self, slot: int, num_tokens: int, scheduled: int, prompt_len: int, cap: int, ending_ids: Iterable[int]) -> None:
        """Hold a lane. `ending_ids` has every id that may be the last one of its output."""
        assert slot not in self._ending_ids, f"lane {slot} is held"
        self.num_tokens[slot], self.scheduled[slot] = num_tokens, scheduled
        self.prompt_lens[slot], self.caps[slot] = prompt_len, cap
        self.edges[slot] = self.marks[slot] = 0
        self.has_grown[slot] = True
        ids = np.unique(np.fromiter(ending_ids, np.intp).clip(0, len(self._num_ending) - 1))
        self._num_ending[ids] += 1
        self._ending_ids[slot] = ids
        self.version += 1

    def leave(self, slot: int) -> int:
        """Hold a lane no longer; returns its `scheduled`."""
        self._num_ending[self._ending_ids.pop(slot)] -= 1
        self.version += 1
        return int(self.scheduled[slot])

    def looked_before(self, slot: int, num_covered: int) -> None:
        """A sequence's next row needs no look as long as its table, of `num_covered` positions, suffices."""
        self.edges[slot] = min(num_covered, self.caps[slot] - 1)

    def looked_after(self, slot: int, block_size: int) -> None:
        """What a sequence has computed is published: the next output worth a look completes a block."""
        num_full = (int(self.num_tokens[slot]) - 1) // block_size
        self.marks[slot] = min((num_full + 1) * block_size + 1, self.caps[slot])

    def append(
        self, slots: npt.NDArray[np.int32], token_ids: npt.NDArray[np.int32]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.intp]]:
        """Count one more token in each of these lanes, with these ids. Returns the new `num_tokens`, and which of `slots` need a look."""
        num_tokens = self.num_tokens.take(slots)
        num_tokens += 1
        self.num_tokens[slots] = num_tokens
        needs_look = self._num_ending.take(token_ids, mode="clip") > 0
        needs_look |= num_tokens >= self.marks.take(slots)
        return num_tokens, needs_look.nonzero()[0]
