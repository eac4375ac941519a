"""The whole of sampling, plainly: one row, float64, full sorts, Python loops."""

from collections.abc import Sequence

import numpy as np

from model_worker.noise import exponentials, noise_words
from tessera.values.sampling import SamplingParams


def ruled_logits(
    logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], outputs: Sequence[int], eos: Sequence[int]
) -> np.ndarray:
    """Logits after masks, bias and penalties, float64 `[vocab]`."""
    ruled = logits.astype(np.float64)
    if params.allowed_token_ids:
        ruled[[token for token in range(len(ruled)) if token not in params.allowed_token_ids]] = -np.inf
    for word in params.bad_words_ids:
        if list(word[:-1]) == list(outputs)[len(outputs) - len(word) + 1 :] and len(word) <= len(outputs) + 1:
            ruled[word[-1]] = -np.inf
    if len(outputs) < params.min_tokens:
        ruled[[*eos, *params.stop_token_ids]] = -np.inf
    for token, bias in params.logit_bias:
        ruled[token] += bias
    for token in {*prompt, *outputs}:
        ruled[token] = (
            ruled[token] / params.repetition_penalty if ruled[token] > 0 else ruled[token] * params.repetition_penalty
        )
    for token in set(outputs):
        ruled[token] -= params.frequency_penalty * list(outputs).count(token) + params.presence_penalty
    return ruled


def probabilities(ruled: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution after temperature, top_k, top_p over what is left, min_p; temperature > 0."""
    scaled = ruled / params.temperature
    p = np.exp(scaled - scaled.max())
    if 0 < params.top_k < len(p):
        p[ruled < np.sort(ruled)[-params.top_k]] = 0
    p /= p.sum()
    if params.top_p < 1:
        descending = np.sort(p)[::-1]
        last = min(int(np.searchsorted(np.cumsum(descending), params.top_p)), len(p) - 1)
        p[p < descending[last]] = 0
    p[p < params.min_p * p.max()] = 0
    return p / p.sum()


def drawn_token(ruled: np.ndarray, params: SamplingParams, output_index: int) -> int:
    """The token: the best one where greedy, else the Gumbel-max draw over the whole vocabulary."""
    if params.temperature == 0:
        return int(ruled.argmax())
    draws = exponentials(noise_words(params.seed, output_index, len(ruled)))
    with np.errstate(divide="ignore"):
        return int(np.argmin(draws / probabilities(ruled, params)))
