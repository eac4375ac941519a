"""Log-probabilities of tokens, as columns."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


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


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs:
    """Of the prompt tokens that a batch came past, row after row: `row_counts` int32 `[R]` says how many tokens of `tokens` are each
    row's. A row that computes the positions `[a, b)` of a prompt of P tokens has those of the tokens `[a + 1, min(b + 1, P))`."""

    row_counts: np.ndarray
    tokens: Logprobs


def joined_logprobs(parts: Sequence[Logprobs]) -> Logprobs:
    """The tokens of all, one after the other; at least one part."""
    return Logprobs(
        *(np.concatenate([getattr(part, name) for part in parts]) for name in ("counts", "token_ids", "logprobs", "ranks"))
    )
