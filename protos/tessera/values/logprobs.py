"""Log-probabilities of tokens, as columns."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_COLUMNS = ("counts", "token_ids", "logprobs", "ranks")


@dataclass(frozen=True, slots=True, eq=False)
class Logprobs:
    """What came of N tokens; entries of one token lie together: first the token itself, then the likeliest ids in descending order (the
    lower id first among equals), then the ids that were asked for, in their order. So an id may come more than once.

    - `counts` int32 `[N]`: entries of each token, 0 where none are wanted
    - `token_ids` int32, `logprobs` float32 `[sum]`: natural logarithms of the model's own probabilities, before any sampling parameter
    - `ranks` int32 `[N]`: how many ids are at least as likely as the token, itself included; 0 without entries
    """

    counts: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray

    def of(self, tokens: np.ndarray) -> "Logprobs":
        """Some of the tokens, by number, in this order."""
        counts = self.counts[tokens]
        firsts = (np.cumsum(self.counts) - self.counts)[tokens]
        entries = np.arange(counts.sum()) + np.repeat(firsts - (np.cumsum(counts) - counts), counts)
        return Logprobs(counts, self.token_ids[entries], self.logprobs[entries], self.ranks[tokens])

    def between(self, first: int, end: int) -> "Logprobs":
        """Those of the tokens `[first, end)`, sharing this one's memory."""
        begin, stop = int(self.counts[:first].sum()), int(self.counts[:end].sum())
        return Logprobs(self.counts[first:end], self.token_ids[begin:stop], self.logprobs[begin:stop], self.ranks[first:end])

    def split(self, sizes: Sequence[int]) -> "list[Logprobs]":
        """So many tokens each, one part after the other; the sizes add up to N."""
        starts = np.concatenate(([0], np.cumsum(self.counts, dtype=np.int64))).tolist()
        parts, first = [], 0
        for size in sizes:
            end = first + size
            begin, stop = starts[first], starts[end]
            parts.append(
                Logprobs(self.counts[first:end], self.token_ids[begin:stop], self.logprobs[begin:stop], self.ranks[first:end])
            )
            first = end
        return parts

    def __len__(self) -> int:
        return len(self.counts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Logprobs):
            return NotImplemented
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in _COLUMNS)

    __hash__ = None  # type: ignore[assignment]  # arrays have none


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs:
    """Of the prompt tokens that a batch came past, row after row: `row_counts` int32 `[R]` says how many tokens of `tokens` are each
    row's. A row that computes the positions `[a, b)` of a prompt of P tokens has those of the tokens `[a + 1, min(b + 1, P))`."""

    row_counts: np.ndarray
    tokens: Logprobs

    def by_row(self) -> list[Logprobs]:
        """Those of each row."""
        return self.tokens.split(self.row_counts.tolist())


def joined_logprobs(parts: Sequence[Logprobs]) -> Logprobs:
    """The tokens of all, one after the other; at least one part."""
    return Logprobs(*(np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS))


def joined_columns(steps: Sequence[Logprobs | None], num_rows: int, rows: slice | np.ndarray) -> Logprobs | None:
    """Of these of `num_rows` rows that have a token a step the tokens, row after row; None where no step has any entries."""
    if all(step is None for step in steps):
        return None
    by_step = joined_logprobs([no_logprobs(num_rows) if step is None else step for step in steps])
    tokens = np.arange(num_rows)[rows][:, None] + num_rows * np.arange(len(steps))
    return by_step.of(tokens.ravel())


def no_logprobs(num_tokens: int) -> Logprobs:
    """So many tokens without entries."""
    none = np.zeros(num_tokens, np.int32)
    return Logprobs(none, np.zeros(0, np.int32), np.zeros(0, np.float32), none)
