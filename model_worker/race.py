"""The race that draws a token: of a row's tokens, the one with the least e / q, q its likelihood and e its exponential draw.

-log(1 - w) >= w: the word itself bounds its draw from below. So only tokens whose bound beats the draw of the most promising one are
contenders, a few in a row, and only they are worth two logarithms in float64. Where few tokens are likely, the others cannot win unless
their words are small, whatever exactly their likelihoods are: two comparisons of the whole row find all contenders (`contenders_by_words`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from model_worker.candidates import Candidates
from model_worker.noise import exponentials

LIKELY = 2.0**-10
"""Relative to the best token."""

MARGIN = 1.001
"""Float32 ratios are off by less than 1e-4: a token further than this from the best one cannot win in float64 either."""


@dataclass(frozen=True, slots=True, eq=False)
class Contenders:
    """Of R rows, one row's after the other: `counts` int64 `[R]`, at least one each; `columns` int64, a column perhaps twice, `words` uint32
    and `logits` float32 `[sum]`."""

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
    reach = exponentials(words[rows, promising]) / likelihoods[rows, promising] * (2.0**32 * MARGIN)
    at = np.flatnonzero(bounds <= reach.astype(np.float32)[:, None])
    ends = np.searchsorted(at, (rows + 1) * likelihoods.shape[1])
    counts = ends.copy()
    counts[1:] -= ends[:-1]
    columns = at if len(rows) == 1 else at - np.repeat(rows * likelihoods.shape[1], counts)
    return Contenders(counts, columns, words.reshape(-1)[at], logits.reshape(-1)[at])


def contenders_by_words(
    likelihoods: np.ndarray, likely: Candidates, words: np.ndarray, logits: np.ndarray, rows: np.ndarray
) -> Contenders:
    """Who may win, of R rows of a whole vocabulary: `words` uint32 `[R, vocab]`, `logits` float32 `[N, vocab]`, in which they are the rows
    `rows`. `likely` has all their tokens that are LIKELY, and perhaps others, with their `likelihoods`, float32 `[R, C]`, 0 where there is none."""
    places = np.arange(len(words))[:, None]
    likely_words = words[places, likely.token_ids]
    is_there = likelihoods > 0
    with np.errstate(divide="ignore"):
        reach = np.where(is_there, exponentials(likely_words) / likelihoods, np.inf).min(axis=1) * MARGIN
    # A token that is not LIKELY wins with a draw below this alone, and its word is no larger.
    small = np.minimum(reach * LIKELY * 2.0**32, 2**32 - 1).astype(np.uint32)
    other_rows, others = np.divmod(np.flatnonzero(words <= small[:, None]), words.shape[1])
    likely_rows, likely_columns = np.nonzero(is_there)
    row_of = np.concatenate([other_rows, likely_rows])
    columns = np.concatenate([others, likely.token_ids[likely_rows, likely_columns]])
    if len(words) > 1:
        order = np.argsort(row_of, kind="stable")
        row_of, columns = row_of[order], columns[order]
    return Contenders(np.bincount(row_of, minlength=len(words)), columns, words[row_of, columns], logits[rows[row_of], columns])


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
    first: np.ndarray = np.minimum.reduceat(columns[is_least], np.searchsorted(row_of[is_least], np.arange(len(counts))))
    return first
