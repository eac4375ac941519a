"""Draws one token for each of several rows. What a row gives does not depend on the rows beside it, bit for bit.

With q = exp((logit - best) / temperature) and one exponential draw e per token, the token with the least e / q is distributed as
softmax(logits / temperature) (the Gumbel-max trick). Filters set q to zero, in this order: top_k, top_p (over what top_k left),
min_p (relative to the likeliest token). Ties are kept: top_k keeps every logit equal to the k-th largest.

A row with a filter leaves a handful of tokens: they are found by bounds (`model_worker.candidates`), and only they are filtered exactly
and get noise. A row without one needs the noise of its whole vocabulary, and that is most of its price.

Every operation is either by element, or along one row: a maximum, a sort, a running sum in float64, a sum of a row by itself.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from model_worker.candidates import Candidates, compact, joined, top_floors
from model_worker.noise import exponentials, noise_words, words_at
from model_worker.sample_rows import SampleRows

_TEMPERATURE_MIN = 1e-30
"""Below it float32 cannot divide by the temperature; nothing but the maximum has a chance long before."""

_MARGIN = 1.001
"""Float32 ratios are off by less than 1e-4: a token further than this from the best one cannot win in float64 either."""

_TOP_P_FLOOR = 1 / 32
"""The search for the top_p set begins with the tokens that are as likely as this, relative to the best one; it squares it until they do."""

_FEW = 64
"""Noise token by token costs less than that of the whole vocabulary where fewer than one in this many tokens needs any."""


class Filter(IntEnum):
    """How the candidates of a row are found."""

    NONE = 0
    TOP_K = 1
    TOP_P = 2
    MIN_P = 3


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """How R rows are drawn: columns `[R]` of `SamplingTable`'s names and types, temperatures not below what can be computed with, and
    `output_indices` uint64."""

    seeds: np.ndarray
    output_indices: np.ndarray
    temperatures: np.ndarray
    top_ks: np.ndarray
    top_ps: np.ndarray
    min_ps: np.ndarray

    @classmethod
    def of(cls, rows: SampleRows) -> "Draws":
        """Those of all rows."""
        table, slots = rows.table, rows.slots
        return cls(
            table.seeds[slots],
            rows.output_indices.astype(np.uint64),
            np.maximum(table.temperatures[slots], _TEMPERATURE_MIN),
            table.top_ks[slots],
            table.top_ps[slots],
            table.min_ps[slots],
        )

    def only(self, rows: np.ndarray) -> "Draws":
        """Some of the rows, by number."""
        return Draws(*(getattr(self, name)[rows] for name in Draws.__dataclass_fields__))

    @property
    def filters(self) -> np.ndarray:
        """The `Filter` of each row, int64 `[R]`."""
        return np.select(
            [self.top_ks > 0, self.top_ps < 1, self.min_ps > 0], [Filter.TOP_K, Filter.TOP_P, Filter.MIN_P], Filter.NONE
        )


@dataclass(frozen=True, slots=True, eq=False)
class Narrowed:
    """Candidates of R rows: `best` float32 `[R]` the highest logit of each, `masses` float64 `[R]` the sum of all its likelihoods where
    top_p needs it, else 0."""

    draws: Draws
    best: np.ndarray
    candidates: Candidates
    masses: np.ndarray

    @classmethod
    def joined(cls, parts: "list[Narrowed]") -> "Narrowed":
        """The rows of all, one after the other."""
        names = Draws.__dataclass_fields__
        return cls(
            Draws(*(np.concatenate([getattr(part.draws, name) for part in parts]) for name in names)),
            np.concatenate([part.best for part in parts]),
            joined([part.candidates for part in parts]),
            np.concatenate([part.masses for part in parts]),
        )


def narrow(logits: np.ndarray, best: np.ndarray, draws: Draws, by: Filter) -> Narrowed:
    """The tokens of each row, float32 `[R, vocab]`, that its filters may leave; `by` is one filter that all rows have. Nothing is mutated."""
    masses = np.zeros(len(logits))
    if by is Filter.TOP_K:
        floors = np.maximum(top_floors(logits, draws.top_ks), np.finfo(np.float32).min)  # no rule's -inf
        chosen = logits >= floors[:, None]
    elif by is Filter.MIN_P:
        # A little too low, for what float32 rounds off: q >= min_p where logit - best >= temperature * log(min_p).
        gaps = draws.temperatures * (np.log(draws.min_ps) * (1 + 1e-5) - 1e-5)
        floors = best + gaps - 1e-6 * (np.abs(best) + np.abs(gaps))
        chosen = logits >= np.nextafter(floors.astype(np.float32), np.float32(-np.inf))[:, None]
    else:
        chosen, masses = _top_p_candidates(_likelihoods(logits, best, draws.temperatures), draws.top_ps)
    return Narrowed(draws, best, compact(logits, chosen), masses)


def is_wide(narrowed: Narrowed, vocab_size: int) -> bool:
    """Whether so many candidates are left that they had better be drawn from at once than kept for a larger batch."""
    return bool(narrowed.candidates.logits.shape[1] * _FEW > vocab_size)


def draw_narrowed(narrowed: Narrowed, vocab_size: int) -> np.ndarray:
    """The token of each row, int32 `[R]`."""
    draws, token_ids = narrowed.draws, narrowed.candidates.token_ids
    likelihoods = _likelihoods(narrowed.candidates.logits, narrowed.best, draws.temperatures)
    _filter(likelihoods, narrowed)
    if is_wide(narrowed, vocab_size):
        words = np.take_along_axis(_rows_of_words(draws, vocab_size), token_ids, axis=1)
    else:
        words = words_at(draws.seeds, draws.output_indices, token_ids)
    columns = _winners(likelihoods, words, narrowed.candidates.logits, narrowed.best, draws.temperatures)
    tokens: np.ndarray = token_ids[np.arange(len(token_ids)), columns].astype(np.int32)
    return tokens


def draw_unfiltered(logits: np.ndarray, best: np.ndarray, draws: Draws) -> np.ndarray:
    """The token of each row, int32 `[R]`, of rows without a filter; as for `narrow`."""
    likelihoods = _likelihoods(logits, best, draws.temperatures)
    words = _rows_of_words(draws, logits.shape[1])
    tokens: np.ndarray = _winners(likelihoods, words, logits, best, draws.temperatures).astype(np.int32)
    return tokens


def _likelihoods(logits: np.ndarray, best: np.ndarray, temperatures: np.ndarray) -> np.ndarray:
    """q, float32 of the shape of `logits`: 1 for the best token."""
    likelihoods = logits - best[:, None]
    if (temperatures != 1).any():
        likelihoods /= temperatures.astype(np.float32)[:, None]
    np.exp(likelihoods, out=likelihoods)
    return likelihoods


def _top_p_candidates(likelihoods: np.ndarray, top_ps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens may be in the top_p set (bool), and the mass of each row, float64 `[R]`. The set is looked for among the likeliest, and
    among more only in the rows where those do not reach top_p."""
    masses: np.ndarray = np.add.reduce(likelihoods, axis=1, dtype=np.float64)
    floors = np.full(len(likelihoods), _TOP_P_FLOOR, np.float32)
    while True:
        chosen = (likelihoods >= floors[:, None]) & (likelihoods > 0)
        short = (_running(compact(likelihoods, chosen).logits)[1][:, -1] < top_ps * masses) & (floors > 0)
        if not short.any():
            return chosen, masses
        floors[short] *= floors[short]


def _running(likelihoods: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each row from the likeliest down, and its running sums from the left, float64: the same whatever the row is filled up with."""
    descending = np.sort(np.maximum(likelihoods, 0), axis=1)[:, ::-1]
    return descending, np.cumsum(descending, axis=1, dtype=np.float64)


def _filter(likelihoods: np.ndarray, narrowed: Narrowed) -> None:
    """Zero, in place, the likelihoods of the candidates (float32 `[R, C]`) that top_k, top_p and min_p rule out."""
    draws, logits = narrowed.draws, narrowed.candidates.logits
    rows, width = np.arange(len(logits)), logits.shape[1]
    with_k = draws.top_ks > 0
    if with_k.any():
        kth = np.sort(logits, axis=1)[rows, np.where(with_k, np.maximum(width - draws.top_ks, 0), 0)]
        likelihoods *= logits >= np.where(with_k, kth, -np.inf)[:, None]
    if (draws.top_ps < 1).any():
        descending, running = _running(likelihoods)
        masses = draws.top_ps * np.where(with_k, running[:, -1], narrowed.masses)
        reached = np.minimum((running < masses[:, None]).sum(axis=1), width - 1)
        likelihoods *= likelihoods >= np.where(draws.top_ps < 1, descending[rows, reached], 0)[:, None]
    if (draws.min_ps > 0).any():
        likelihoods *= likelihoods >= draws.min_ps.astype(np.float32)[:, None]


def _rows_of_words(draws: Draws, vocab_size: int) -> np.ndarray:
    """The noise of the whole vocabulary for each row, uint32 `[R, vocab]`."""
    words = np.empty((len(draws.seeds), vocab_size), np.uint32)
    for row, (seed, output_index) in enumerate(zip(draws.seeds.tolist(), draws.output_indices.tolist(), strict=True)):
        words[row] = noise_words(seed, output_index, vocab_size)
    return words


def _winners(
    likelihoods: np.ndarray, words: np.ndarray, logits: np.ndarray, best: np.ndarray, temperatures: np.ndarray
) -> np.ndarray:
    """The column with the least e / q in each row, the first of equals; int64 `[R]`. All `[R, C]`, `words` uint32.

    -log(1 - w) >= w: the word itself bounds its draw from below, so only tokens whose bound beats the draw of the most promising one are
    worth two logarithms in float64.
    """
    rows = np.arange(len(likelihoods))
    bounds = words.astype(np.float32)
    bounds += np.float32(0.5)
    with np.errstate(divide="ignore", over="ignore"):
        bounds /= likelihoods
    promising = bounds.argmin(axis=1)
    reach = exponentials(words[rows, promising]) / likelihoods[rows, promising] * (2.0**32 * _MARGIN)
    contenders = np.flatnonzero(bounds <= reach.astype(np.float32)[:, None])
    contender_rows, columns = np.divmod(contenders, likelihoods.shape[1])
    gaps = (logits.reshape(-1)[contenders].astype(np.float64) - best[contender_rows]) / temperatures[contender_rows]
    scores = np.log(exponentials(words.reshape(-1)[contenders])) - gaps
    least = np.minimum.reduceat(scores, np.searchsorted(contender_rows, rows))
    is_least = np.flatnonzero(scores == least[contender_rows])
    winners: np.ndarray = columns[is_least[np.searchsorted(contender_rows[is_least], rows)]]
    return winners
