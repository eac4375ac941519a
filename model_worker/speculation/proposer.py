"""The port to whatever guesses the next tokens of sequences."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from model_worker.sampling_table import SamplingTable
from model_worker.slot_table import SlotTable


@dataclass(frozen=True, slots=True, eq=False)
class Drafts:
    """Drafts of R rows: `counts` int64 `[R]`; `token_ids` int32 `[R, W]`, W at least the largest count, -1 behind a row's count. `odds` float32
    `[R, W, vocab_size]`: the probabilities that each was drawn with; None where each was certain."""

    counts: np.ndarray
    token_ids: np.ndarray
    odds: np.ndarray | None = None

    @classmethod
    def none(cls, num_rows: int) -> "Drafts":
        """No draft for anybody."""
        return cls(np.zeros(num_rows, np.int64), np.empty((num_rows, 0), np.int32))

    def of(self, rows: np.ndarray) -> "Drafts":
        """Those of some rows (indices or bool), in this order."""
        return Drafts(self.counts[rows], self.token_ids[rows], None if self.odds is None else self.odds[rows])

    def at(self, rows: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """The draft number `places[i]` from 0 of `rows[i]`, int32 `[N]`, -1 where there is none; and its odds, of which those of no draft mean
        nothing. int64 `[N]` both."""
        behind = np.full((len(self.counts), 1), -1, np.int32)
        token_ids = np.concatenate((self.token_ids, behind), axis=1)[rows, places]
        return token_ids, None if self.odds is None else self.odds[rows, np.minimum(places, self.odds.shape[1] - 1)]


class Proposer(Protocol):
    """Guesses. A wrong draft costs its position in one step and changes no token, so nothing has to be remembered about a guess."""

    def propose(self, slots: np.ndarray, rooms: np.ndarray, table: SlotTable, sampling: SamplingTable) -> Drafts:
        """Up to `rooms[i]` >= 0 tokens of the vocabulary to follow the ids of `slots[i]`; both int64 `[R]`, a slot comes at most once.

        Called at the beginning of a step, once for all rows that have room: `table` holds every token sampled until then, and blocks for
        the positions of all drafts. Of it only reads are allowed, and `place_drafts`.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Passed:
    """What a pass of the model computed and keeps: positions `[starts[i], starts[i] + counts[i])` of `slots[i]`, int64 `[R]` each, counts >= 1.
    The slot holds the id that follows each of them. `hidden` `[T, W]`: the hidden states that were asked for, of the whole pass; a row's are
    those from `offsets[i]` (int64) on. None where nobody asked."""

    slots: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    offsets: np.ndarray
    hidden: Tensor | None

    def singles_first(self) -> tuple["Passed", int]:
        """The rows of one position before the others, and how many they are."""
        order = np.argsort(self.counts > 1, kind="stable")
        rows = Passed(self.slots[order], self.starts[order], self.counts[order], self.offsets[order], self.hidden)
        return rows, int(np.count_nonzero(self.counts == 1))


class Follower(ABC):
    """A proposer that computes KV of its own beside the model's. It is told of every pass, in order; where it is not, because a pass or
    its own computing failed, its KV there is anything, which costs drafts and no token.

    `taps`: the hidden states that it wants of a pass, see `TappedLM`; None: none.
    """

    taps: tuple[int, ...] | None = None

    @abstractmethod
    def propose(self, slots: np.ndarray, rooms: np.ndarray, table: SlotTable, sampling: SamplingTable) -> Drafts:
        """See `Proposer`."""

    @abstractmethod
    def follow(self, passed: Passed, table: SlotTable) -> None:
        """Compute its own KV of the positions of a pass. Called at the end of a step."""
