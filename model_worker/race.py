"""The race that draws a token: of a row's tokens, the one with the least e / q, q its likelihood and e its exponential draw.

-log(1 - w) >= w: the word itself bounds its draw from below. So only tokens whose bound beats the draw of the most promising one are
contenders, a few in a row, and only they are worth two logarithms in float64.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from model_worker.noise import exponentials

_MARGIN = 1.001
"""Float32 ratios are off by less than 1e-4: a token further than this from the best one cannot win in float64 either."""


@dataclass(frozen=True, slots=True, eq=False)
class Contenders:
    """Of R rows, one row's after the other, ascending: `counts` int64 `[R]`, at least one each; `columns` int64, `words` uint32 and `logits`
    float32 `[sum]`."""

    counts: np.ndarray
    columns: np.ndarray
    words: np.ndarray
    logits: np.ndarray


def contenders(likelihoods: np.ndarray, words: np.ndarray, logits: np.ndarray, bounds: np.ndarray) -> Contenders:
    """Who may win, of `[R, C]` tokens: `likelihoods` float32, 1 for the best of each row; `words` uint32; `logits` float32; `bounds` float32,
    overwritten."""
    rows = np.arange(len(likelihoods))
    np.copyto(bounds, words, casting="same_kind")
    bounds += np.float32(0.5)
    with np.errstate(divide="ignore", over="ignore"):
        bounds /= likelihoods
    promising = bounds.argmin(axis=1)
    reach = exponentials(words[rows, promising]) / likelihoods[rows, promising] * (2.0**32 * _MARGIN)
    at = np.flatnonzero(bounds <= reach.astype(np.float32)[:, None])
    ends = np.searchsorted(at, (rows + 1) * likelihoods.shape[1])
    counts = ends.copy()
    counts[1:] -= ends[:-1]
    columns = at if len(rows) == 1 else at - np.repeat(rows * likelihoods.shape[1], counts)
    return Contenders(counts, columns, words.reshape(-1)[at], logits.reshape(-1)[at])


def winners(parts: Sequence[Contenders], best: np.ndarray, temperatures: np.ndarray) -> np.ndarray:
    """The column of the winner of each row of all parts, the first of equals; int64 `[R]`. `best` float32, the highest logits, and
    `temperatures` float64 `[R]`, positive."""
    counts = np.concatenate([part.counts for part in parts])
    columns = np.concatenate([part.columns for part in parts])
    row_of = np.repeat(np.arange(len(counts)), counts)
    logits = np.concatenate([part.logits for part in parts]).astype(np.float64)
    draws = exponentials(np.concatenate([part.words for part in parts]))
    scores = np.log(draws) - (logits - best[row_of]) / temperatures[row_of]
    least = np.minimum.reduceat(scores, np.cumsum(counts) - counts)
    is_least = np.flatnonzero(scores == least[row_of])
    first: np.ndarray = columns[is_least[np.searchsorted(row_of[is_least], np.arange(len(counts)))]]
    return first
