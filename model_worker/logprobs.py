"""Log-probabilities from logits: log-softmax as the model gives it, before any rule of sampling (vLLM's `raw_logprobs`)."""

from collections.abc import Sequence

import numpy as np

from model_worker.candidates import compact, top_floors
from model_worker.workspace import rows_per_chunk
from tessera.values.logprobs import Logprobs

NO_IDS = np.zeros(0, np.int64)
"""For tokens that no further ids are asked for with; shared and read-only."""
NO_IDS.flags.writeable = False


def logprobs_of(logits: np.ndarray, token_ids: np.ndarray, num_top: np.ndarray, asked: Sequence[np.ndarray]) -> Logprobs:
    """Of `token_ids[N]` under `logits`, float32 `[N, vocab]`, not mutated: each with its `num_top[N]` likeliest ids (negative: no entries
    for this token, whose logits may be anything; else they are finite) and the ids `asked[i]`, int64."""
    wanted = np.flatnonzero(num_top >= 0)
    counts, ranks = np.zeros(len(logits), np.int32), np.zeros(len(logits), np.int32)
    counts[wanted] = 1 + np.minimum(num_top[wanted], logits.shape[1]) + [len(asked[row]) for row in wanted.tolist()]
    found = Logprobs(counts, np.zeros(counts.sum(), np.int32), np.zeros(counts.sum(), np.float32), ranks)
    starts = np.cumsum(counts) - counts
    step = rows_per_chunk(logits.shape[1])
    for first in range(0, len(wanted), step):
        rows = wanted[first : first + step]
        chunk = logits[rows]
        own = token_ids[rows].astype(np.int64)
        at_least = np.flatnonzero(chunk >= chunk[np.arange(len(rows)), own][:, None])
        ranks[rows] = np.bincount(at_least // chunk.shape[1], minlength=len(rows))
        entry_rows, places, ids = _entries(chunk, own, num_top[rows], [asked[row] for row in rows.tolist()])
        at = starts[rows][entry_rows] + places
        found.token_ids[at] = ids
        found.logprobs[at] = chunk[entry_rows, ids] - _log_masses(chunk)[entry_rows]
    return found


def _log_masses(logits: np.ndarray) -> np.ndarray:
    """log(sum(exp(logits))) of each row, float64 `[R]`. The terms are float32 beside the best: off by less than 1e-6."""
    best = logits.max(axis=1, keepdims=True)
    terms = logits - best
    np.exp(terms, out=terms)
    masses: np.ndarray = best[:, 0] + np.log(np.add.reduce(terms, axis=1, dtype=np.float64))
    return masses


def _entries(
    logits: np.ndarray, own: np.ndarray, num_top: np.ndarray, asked: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All entries of R tokens, in three parts: (row, place among the row's entries, token id), int64 each."""
    rows = np.arange(len(logits))
    num_top = np.minimum(num_top, logits.shape[1])
    likeliest = np.zeros((len(rows), 0), np.int64)
    if num_top.any():
        chosen = logits >= top_floors(logits, np.maximum(num_top, 1))[:, None]
        _, candidates = compact(logits, chosen, logits.shape[1])
        order = np.argsort(-candidates.logits, axis=1, kind="stable")[:, : num_top.max()]
        likeliest = np.take_along_axis(candidates.token_ids, order, axis=1)
    is_top = np.arange(likeliest.shape[1]) < num_top[:, None]
    top_rows, top_places = np.nonzero(is_top)
    asked_counts = np.array([len(ids) for ids in asked])
    asked_rows = np.repeat(rows, asked_counts)
    asked_places = np.arange(len(asked_rows)) - np.repeat(np.cumsum(asked_counts) - asked_counts, asked_counts)
    return (
        np.concatenate([rows, top_rows, asked_rows]),
        np.concatenate([np.zeros_like(rows), 1 + top_places, 1 + num_top[asked_rows] + asked_places]),
        np.concatenate([own, likeliest[is_top], *asked]),
    )
