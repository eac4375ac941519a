"""From logits to one token per row. A token depends on (logits, sampling parameters, seed, output index) alone.

Greedy rows cost their share of one argmax over the batch. A sampled row is worked on by itself, in buffers that fit a core's cache, with the
same operations on the same shapes whatever its neighbours are; that is what makes it independent of the batch.

With q = exp((logit - max) / temperature) and one exponential draw e per token, the token with the least e / q is distributed as
softmax(logits / temperature) (the Gumbel-max trick). Filters set q to zero, in this order: top_k, top_p (over what top_k left),
min_p (relative to the likeliest token). Ties are kept: top_k keeps every logit equal to the k-th largest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from model_worker.noise import exponentials, noise_words
from tessera.values.sampling import SamplingParams

_TEMPERATURE_MIN = 1e-30
"""Below it float32 cannot divide by the temperature; nothing but the maximum has a chance long before."""

_MARGIN = 1.001
"""Float32 ratios are off by less than 1e-4: a token further than this from the best one cannot win in float64 either."""

_TOP_P_STEP = 1 / 32
"""How fast the search for the top_p set widens, as a factor on the likelihood relative to the best token."""


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """`token_ids` int32 `[S]`, meaningless where `failures` has the row: row -> why it has no token."""

    token_ids: np.ndarray
    failures: dict[int, str]


class Sampler:
    """Draws tokens for a model whose end-of-sequence ids are `eos_token_ids`."""

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        self._eos_token_ids = tuple(eos_token_ids)

    def sample(self, logits: np.ndarray, params: Sequence[SamplingParams], output_indices: Sequence[int]) -> Sampled:
        """One token per row of `logits`, float32 `[S, vocab]` on the host, overwritten where `min_tokens` masks. `output_indices[S]`
        says which output token of its request a row draws, from 0."""
        lowest = logits.min(axis=1)
        token_ids = logits.argmax(axis=1).astype(np.int32)
        highest = logits[np.arange(len(logits)), token_ids]  # a NaN is its row's minimum and maximum
        finite = np.isfinite(lowest) & np.isfinite(highest)
        failures = {int(row): "the model computed NaN or infinite logits" for row in np.flatnonzero(~finite)}
        for row, (row_params, output_index) in enumerate(zip(params, output_indices, strict=True)):
            if row in failures:
                continue
            if output_index < row_params.min_tokens:
                if not self._mask_stops(logits[row], row_params.stop_token_ids):
                    failures[row] = "min_tokens rules out every token of the vocabulary"
                    continue
                token_ids[row] = logits[row].argmax()
            if row_params.temperature > 0:
                token_ids[row] = draw(logits[row], int(token_ids[row]), row_params, output_index)
        return Sampled(token_ids, failures)

    def _mask_stops(self, row_logits: np.ndarray, stop_token_ids: tuple[int, ...]) -> bool:
        """Rule out EOS and stop token ids, in place. False when nothing else is left."""
        stops = {token for token in (*self._eos_token_ids, *stop_token_ids) if token < len(row_logits)}
        row_logits[list(stops)] = -np.inf
        return len(stops) < len(row_logits)


def draw(logits: np.ndarray, best: int, params: SamplingParams, output_index: int) -> int:
    """Draw from one row: `logits` float32 `[vocab]`, finite or -inf, not mutated; `best` is its argmax; temperature > 0."""
    temperature = max(params.temperature, _TEMPERATURE_MIN)
    likelihoods = logits - logits[best]
    likelihoods /= np.float32(temperature)
    np.exp(likelihoods, out=likelihoods)
    _filter(likelihoods, logits, params)
    words = noise_words(params.seed, output_index, len(logits))
    # -log(1 - w) >= w: the word itself bounds its draw from below, so only tokens whose bound beats the draw of the
    # most promising one are worth two logarithms in float64.
    bounds = words.astype(np.float32)
    bounds += np.float32(0.5)
    with np.errstate(divide="ignore", over="ignore"):
        bounds /= likelihoods
    promising = int(bounds.argmin())
    reach = float(exponentials(words[promising]) / likelihoods[promising]) * 2.0**32 * _MARGIN
    contenders = np.flatnonzero(bounds <= np.float32(reach))
    gaps = (logits[contenders].astype(np.float64) - float(logits[best])) / temperature
    return int(contenders[np.argmin(np.log(exponentials(words[contenders])) - gaps)])


def _filter(likelihoods: np.ndarray, logits: np.ndarray, params: SamplingParams) -> None:
    """Zero, in place, the likelihoods (float32 `[vocab]`, 1 for the best token) that top_k, top_p and min_p rule out."""
    if 0 < params.top_k < len(logits):
        kth = len(logits) - params.top_k
        likelihoods *= logits >= np.partition(logits, kth)[kth]
    if params.top_p < 1:
        likelihoods *= likelihoods >= _top_p_cutoff(likelihoods, params.top_p)
    if params.min_p > 0:
        likelihoods *= likelihoods >= np.float32(params.min_p)


def _top_p_cutoff(likelihoods: np.ndarray, top_p: float) -> np.float32:
    """The least likelihood in the smallest set of likeliest tokens that holds `top_p` of the mass.

    Only as many tokens are sorted as are needed to reach that mass: mostly a handful, all of them for a flat distribution.
    """
    mass = top_p * float(likelihoods.sum(dtype=np.float64))
    floor = np.float32(_TOP_P_STEP)
    while True:
        candidates = np.compress(likelihoods >= floor, likelihoods)
        if floor == 0 or float(candidates.sum(dtype=np.float64)) >= mass:
            break
        floor = np.float32(floor * _TOP_P_STEP)
    descending = np.sort(candidates)[::-1]
    reached = int(np.searchsorted(np.cumsum(descending, dtype=np.float64), mass))
    return np.float32(descending[min(reached, len(descending) - 1)])
