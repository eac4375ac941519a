"""Draws one token for each of several rows. What a row gives does not depend on the rows beside it, bit for bit.

With q = exp((logit - best) / temperature) and one exponential draw e per token, the token with the least e / q is distributed as
softmax(logits / temperature) (the Gumbel-max trick). Filters set q to zero, in this order: top_k, top_p (over what top_k left),
min_p (relative to the likeliest token). Ties are kept: top_k keeps every logit equal to the k-th largest.

A row whose filters leave few tokens is narrowed to candidates by a bound first (`narrow`), and only they are filtered exactly and get noise.
All others need the noise of the whole vocabulary, which is most of their price (`draw_unfiltered`, or `draw_whole` where many tokens are likely).

Every operation is by element, or along one row: a maximum, a sort, a running sum in float64, a sum of one row by itself.
"""

from dataclasses import dataclass

import numpy as np

from model_worker.candidates import Candidates, compact, joined, kth_largest, top_floors
from model_worker.draws import Draws
from model_worker.noise import noise_words, words_at
from model_worker.race import LIKELY, contenders, contenders_by_words, winners
from model_worker.sampling_table import Filter
from model_worker.workspace import Workspace, rows_per_group

_TOP_P_FLOORS = (2.0**-5, 2.0**-10, 2.0**-15)
"""The top_p set is looked for among the tokens that are as likely as this, relative to the best one; last, among all."""

_WHOLE_TOP_P_FLOORS = (2.0**-8, 2.0**-10, 2.0**-12, 2.0**-14, 2.0**-17, 2.0**-20, 0.0)
"""The same for a row that leaves many tokens: the fewer, the less there is to sort."""

_FEW = 64
"""Noise token by token costs less than that of the whole vocabulary where fewer than one in this many tokens needs any..."""

_CANDIDATES_MIN = 32
"""...and so few never cost much."""

_WORDS_MIN = 1 << 17
"""Noise token by token takes as long as this many words of whole rows, however few tokens there are."""

MASS_ERROR = 1e-5
"""Sums of the same likelihoods, each rounded as exp in float32 is on one device or the other, differ by a tenth of this at most."""

_SMALLEST = 2.0**-149
"""The smallest number above 0 in float32, which has only multiples of it near 0."""

_LOWEST = np.finfo(np.float32).min
"""Above what a rule has ruled out."""


@dataclass(frozen=True, slots=True, eq=False)
class Narrowed:
    """Candidates of R of the rows that were worked on together: `rows` int64 `[R]` their numbers there, `best` float32 `[R]` their highest
    logits, `masses` float64 `[R]` the sum of all their likelihoods where top_p needs it, else 0."""

    rows: np.ndarray
    draws: Draws
    best: np.ndarray
    candidates: Candidates
    masses: np.ndarray

    @classmethod
    def joined(cls, parts: "list[Narrowed]") -> "Narrowed":
        """All, one after the other."""
        return cls(
            np.concatenate([part.rows for part in parts]),
            Draws.joined([part.draws for part in parts]),
            np.concatenate([part.best for part in parts]),
            joined([part.candidates for part in parts]),
            np.concatenate([part.masses for part in parts]),
        )


def narrow(logits: np.ndarray, best: np.ndarray, draws: Draws, by: Filter, space: Workspace) -> list[Narrowed]:
    """The tokens that the filters of each row of `logits`, float32 `[R, vocab]`, may leave; `by` is one filter that all rows have, or none:
    then, the tokens that are LIKELY. Rows that are left out keep too many. Nothing is mutated."""
    if by is Filter.TOP_P:
        return _narrow_by_top_p(logits, best, draws, space)
    if by is Filter.TOP_K:
        floors = np.maximum(top_floors(logits, draws.top_ks), _LOWEST)
    else:
        floors = min_p_floors(best, draws.temperatures, np.full(len(best), LIKELY) if by is Filter.NONE else draws.min_ps)
    chosen = np.greater_equal(logits, floors[:, None], out=space.chosen[: len(logits)])
    rows, candidates = compact(logits, chosen, _width_max(logits.shape[1]))
    return [Narrowed(rows, draws.only(rows), best[rows], candidates, np.zeros(len(rows)))] if len(rows) else []


def min_p_floors(best: np.ndarray, temperatures: np.ndarray, min_ps: np.ndarray) -> np.ndarray:
    """A logit for each of R rows, float32 `[R]`, below which no token is as likely as `min_ps` (float64 `[R]`), relative to the best one."""
    # A little too low, for what float32 rounds off: q >= min_p where logit - best >= temperature * log(min_p). Near zero float32 has
    # only multiples of its smallest number, and a likelihood may have been rounded up to one.
    gaps = temperatures * (np.log(np.maximum(min_ps - _SMALLEST, _SMALLEST / 2)) * (1 + 1e-5) - 1e-5)
    floors: np.ndarray = np.maximum(best + gaps - 1e-6 * (np.abs(best) + np.abs(gaps)), _LOWEST).astype(np.float32)
    return floors


def top_p_reach(tops: np.ndarray, best: np.ndarray, draws: Draws, masses: np.ndarray) -> np.ndarray:
    """How many of the highest logits of each of R rows, `tops` float32 `[R, C]` in descending order, top_p may leave, int64 `[R]`; C + 1 where it
    cannot be told from `masses`, float64 `[R]`, which may be off by `MASS_ERROR` of themselves, where the cut is."""
    rows, width = np.arange(len(tops)), tops.shape[1]
    likelihoods = _likelihoods(tops, best, draws.temperatures, np.empty_like(tops))
    descending, running = _running(likelihoods)
    least, most = (
        (running < (draws.top_ps * masses * error)[:, None]).sum(axis=1) for error in (1 - MASS_ERROR, 1 + MASS_ERROR)
    )
    cutoffs = descending[rows, np.minimum(least, width - 1)] * (1 - MASS_ERROR)
    needed: np.ndarray = np.where((least == most) & (most < width), (likelihoods >= cutoffs[:, None]).sum(axis=1), width + 1)
    return needed


def _width_max(vocab_size: int) -> int:
    """Candidates of a row that is narrowed to them."""
    return max(vocab_size // _FEW, _CANDIDATES_MIN)


def draw_narrowed(narrowed: Narrowed, vocab_size: int) -> np.ndarray:
    """The token of each row, int32 `[R]`."""
    draws, candidates, rows = narrowed.draws, narrowed.candidates, np.arange(len(narrowed.rows))
    likelihoods = _likelihoods(candidates.logits, narrowed.best, draws.temperatures, np.empty_like(candidates.logits))
    if (draws.top_ks > 0).any():
        width = likelihoods.shape[1]
        kth = kth_largest(candidates.logits, np.clip(draws.top_ks, 1, width))
        likelihoods *= candidates.logits >= np.where(draws.top_ks > 0, kth, _LOWEST)[:, None]
    if (draws.top_ps < 1).any():
        descending, running = _running(likelihoods)
        masses = draws.top_ps * np.where(draws.top_ks > 0, running[:, -1], narrowed.masses)
        reached = np.minimum((running < masses[:, None]).sum(axis=1), likelihoods.shape[1] - 1)
        likelihoods *= likelihoods >= np.where(draws.top_ps < 1, descending[rows, reached], 0)[:, None]
    likelihoods *= likelihoods >= draws.min_ps.astype(np.float32)[:, None]
    words = _words_of(candidates.token_ids, draws, vocab_size)
    parts = [contenders(likelihoods, words, candidates.logits, np.empty_like(likelihoods))]
    columns = winners(parts, narrowed.best, draws.temperatures)
    tokens: np.ndarray = candidates.token_ids[rows, columns].astype(np.int32)
    return tokens


def _words_of(token_ids: np.ndarray, draws: Draws, vocab_size: int) -> np.ndarray:
    """The noise of tokens `[R, C]`, uint32."""
    if len(token_ids) * vocab_size > _WORDS_MIN:
        return words_at(draws.seeds, draws.output_indices, token_ids)
    numbers = zip(draws.seeds.tolist(), draws.output_indices.tolist(), strict=True)
    return np.stack([noise_words(*number, vocab_size)[ids] for number, ids in zip(numbers, token_ids, strict=True)])


def draw_whole(logits: np.ndarray, best: np.ndarray, draws: Draws, space: Workspace) -> np.ndarray:
    """The token of each row, int32 `[R]`; as for `narrow`, whatever the filters are."""
    num_rows, vocab_size = logits.shape
    seeds, output_indices = draws.seeds.tolist(), draws.output_indices.tolist()
    parts, step = [], rows_per_group(vocab_size)
    for first in range(0, num_rows, step):
        rows = slice(first, min(first + step, num_rows))
        size = rows.stop - first
        likelihoods = _likelihoods(logits[rows], best[rows], draws.temperatures[rows], space.likelihoods[:size])
        if draws.are_filtered:
            _filter_whole(likelihoods, logits[rows], draws.only(np.arange(first, rows.stop)))
        for row in range(size):
            space.words[row] = noise_words(seeds[first + row], output_indices[first + row], vocab_size)
        parts.append(contenders(likelihoods, space.words[:size], logits[rows], space.bounds[:size]))
    tokens: np.ndarray = winners(parts, best, draws.temperatures).astype(np.int32)
    return tokens


def likelihoods_left(logits: np.ndarray, best: np.ndarray, draws: Draws) -> np.ndarray:
    """What the filters of each row of `logits`, float32 `[R, vocab]`, leave: float32 of this shape, 1 for the best token, 0 for what has no
    chance."""
    likelihoods = _likelihoods(logits, best, draws.temperatures, np.empty_like(logits))
    if draws.are_filtered:
        _filter_whole(likelihoods, logits, draws)
    return likelihoods


def draw_unfiltered(logits: np.ndarray, likely: Narrowed, space: Workspace) -> np.ndarray:
    """The token of each of the rows of `likely`, int32 `[R]`, which have no filter; `logits` are those of all rows that were narrowed together."""
    draws, candidates, vocab_size = likely.draws, likely.candidates, logits.shape[1]
    seeds, output_indices = draws.seeds.tolist(), draws.output_indices.tolist()
    likelihoods = _likelihoods(candidates.logits, likely.best, draws.temperatures, np.empty_like(candidates.logits))
    parts, step = [], rows_per_group(vocab_size)
    for first in range(0, len(likely.rows), step):
        rows = np.arange(first, min(first + step, len(likely.rows)))
        words = space.words[: len(rows)]
        for row in rows.tolist():
            words[row - first] = noise_words(seeds[row], output_indices[row], vocab_size)
        group = Candidates(candidates.token_ids[rows], candidates.logits[rows])
        parts.append(contenders_by_words(likelihoods[rows], group, words, logits, likely.rows[rows]))
    tokens: np.ndarray = winners(parts, likely.best, draws.temperatures).astype(np.int32)
    return tokens


def _filter_whole(likelihoods: np.ndarray, logits: np.ndarray, draws: Draws) -> None:
    """Zero, in place, the likelihoods, float32 `[R, vocab]`, that the filters rule out."""
    with_k = draws.top_ks > 0
    if with_k.any():
        kth = kth_largest(logits, np.clip(draws.top_ks, 1, logits.shape[1]))
        likelihoods *= logits >= np.where(with_k, kth, _LOWEST)[:, None]
    if (draws.top_ps < 1).any():
        cutoffs = np.zeros(len(logits), np.float32)
        for row in np.flatnonzero(draws.top_ps < 1).tolist():
            cutoffs[row] = _top_p_cutoff(likelihoods[row], float(draws.top_ps[row]), is_total_running=bool(with_k[row]))
        likelihoods *= likelihoods >= cutoffs[:, None]
    likelihoods *= likelihoods >= draws.min_ps.astype(np.float32)[:, None]


def _narrow_by_top_p(logits: np.ndarray, best: np.ndarray, draws: Draws, space: Workspace) -> list[Narrowed]:
    likelihoods = _likelihoods(logits, best, draws.temperatures, space.likelihoods[: len(logits)])
    masses = np.add.reduce(likelihoods, axis=1, dtype=np.float64)
    left, parts = np.arange(len(logits)), []
    for floor in _TOP_P_FLOORS:
        some = slice(None) if len(left) == len(logits) else left
        chosen = np.greater_equal(likelihoods[some], np.float32(floor), out=space.chosen[: len(left)])
        rows, candidates = compact(logits[some], chosen, _width_max(logits.shape[1]))
        rows = left[rows]
        found = _likelihoods(candidates.logits, best[rows], draws.temperatures[rows], np.empty_like(candidates.logits))
        reached = _running(found)[1][:, -1] >= draws.top_ps[rows] * masses[rows]
        if reached.any():
            done, kept = rows[reached], Candidates(candidates.token_ids[reached], candidates.logits[reached])
            parts.append(Narrowed(done, draws.only(done), best[done], kept, masses[done]))
        left = rows[~reached]
        if not len(left):
            break
    return parts


def _top_p_cutoff(likelihoods: np.ndarray, top_p: float, *, is_total_running: bool) -> np.float32:
    """The least likelihood, of float32 `[vocab]`, in the smallest set of likeliest tokens that holds `top_p` of the mass, whose sum is a
    running one from the likeliest down where said."""
    total = np.add.reduce(likelihoods, dtype=np.float64)
    for floor in (0.0,) if is_total_running else _WHOLE_TOP_P_FLOORS:
        some = np.compress(likelihoods > np.float32(floor), likelihoods)
        if floor > 0 and np.add.reduce(some, dtype=np.float64) < top_p * total:
            continue
        descending, running = _running(some[None])
        mass = top_p * (running[0, -1] if is_total_running else total)
        if running[0, -1] >= mass:
            break
    reached = int(np.searchsorted(running[0], mass))
    return np.float32(descending[0, reached] if reached < running.shape[1] else 0)


def _likelihoods(logits: np.ndarray, best: np.ndarray, temperatures: np.ndarray, out: np.ndarray) -> np.ndarray:
    """q, float32 of the shape of `logits`: 1 for the best token."""
    np.subtract(logits, best[:, None], out=out)
    if (temperatures != 1).any():
        out /= temperatures.astype(np.float32)[:, None]
    np.exp(out, out=out)
    return out


def _running(likelihoods: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each row from the likeliest down, and its running sums from the left, float64: the same whatever zeros the row is filled up with."""
    descending = -np.sort(-likelihoods, axis=1)
    return descending, np.cumsum(descending, axis=1, dtype=np.float64)
