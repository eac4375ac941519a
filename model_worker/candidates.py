"""Which tokens of a row may matter at all: found for several rows at once, so that what is dear is done for those alone.

A bound here may let tokens through that a filter then rules out, never the reverse; the filter itself is exact. So it does not matter that the
bounds depend on what rows are worked on together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_GROUP = 64
"""Logits that share one maximum in the search for the k-th largest."""

_GROUPS_PER_K = 4
"""Fewer groups than this for each of the k: their maxima would bound the k-th largest too loosely."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Some tokens of R rows, ascending: `token_ids` int64 and `logits` float32 `[R, C]`, on the right filled up with 0 and -inf."""

    token_ids: np.ndarray
    logits: np.ndarray


def compact(logits: np.ndarray, chosen: np.ndarray, width_max: int) -> tuple[np.ndarray, Candidates]:
    """The tokens of each row that `chosen` (bool, of the shape of `logits`, float32 `[N, vocab]`) names, of the rows that have no more than
    `width_max` of them; and the numbers of those rows, int64 `[R]`."""
    num_rows, vocab_size = logits.shape
    rows = np.arange(num_rows)
    if np.count_nonzero(chosen) > width_max:
        # Counting a row takes a fraction of finding its places, so those with too many go first.
        rows = np.flatnonzero([np.count_nonzero(row) <= width_max for row in chosen])
        chosen = chosen if len(rows) == num_rows else chosen[rows]
    at = np.flatnonzero(chosen)
    ends = np.searchsorted(at, np.arange(1, len(rows) + 1) * vocab_size)
    counts = np.diff(ends, prepend=0)
    place = np.repeat(np.arange(len(rows)), counts)
    columns = np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts)
    token_ids = np.zeros((len(rows), max(1, int(counts.max(initial=0)))), np.int64)
    found = np.full(token_ids.shape, -np.inf, np.float32)
    ids = at - place * vocab_size
    token_ids[place, columns] = ids
    found[place, columns] = logits[rows[place], ids]
    return rows, Candidates(token_ids, found)


def joined(parts: Sequence[Candidates]) -> Candidates:
    """The rows of all, one after the other."""
    width = max(part.logits.shape[1] for part in parts)
    num_rows = sum(len(part.logits) for part in parts)
    whole = Candidates(np.zeros((num_rows, width), np.int64), np.full((num_rows, width), -np.inf, np.float32))
    first = 0
    for part in parts:
        rows, columns = slice(first, first + len(part.logits)), slice(part.logits.shape[1])
        whole.token_ids[rows, columns], whole.logits[rows, columns] = part.token_ids, part.logits
        first = rows.stop
    return whole


def top_floors(logits: np.ndarray, ks: np.ndarray) -> np.ndarray:
    """For each row, a number that at least `k` of its logits reach, k from 1 to vocab: mostly just below the k-th largest.

    The k-th largest of the maxima of groups is one, since each group that reaches it has a logit that does. float32 `[R]`.
    """
    num_rows, vocab_size = logits.shape
    num_groups = vocab_size // _GROUP
    maxima = logits
    if int(ks.max()) * _GROUPS_PER_K <= num_groups:
        # Group g has the logits g, g + num_groups, g + 2 * num_groups...: that way they are compared whole vectors at a time.
        maxima = logits[:, : num_groups * _GROUP].reshape(num_rows, _GROUP, num_groups).max(axis=1)
    return kth_largest(maxima, ks)


def kth_largest(values: np.ndarray, ks: np.ndarray) -> np.ndarray:
    """The k-th largest of each row, k from 1 to the length of a row; `[R]` of the type of `values`, which are not mutated."""
    places = values.shape[1] - ks
    found: np.ndarray = np.partition(values, np.unique(places), axis=1)[np.arange(len(values)), places]
    return found
