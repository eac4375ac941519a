"""Classical rejection sampling (Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318).

A draft d that was drawn from q stands with the probability min(1, p(d) / q(d)), p being what the model's token is drawn from; else the token is
drawn from max(0, p - q). Either way it is distributed as p, but which token it is depends on the draft. The numbers are those of (seed,
output index), of streams of their own, so that the same drafts in the same rows give the same tokens again.
"""

import numpy as np

from model_worker.noise import uniforms
from model_worker.sample_rows import SampleRows
from model_worker.sampler import NO_TOKEN, Sampler
from model_worker.workspace import rows_per_chunk

ACCEPTANCE, RESIDUAL, DRAFT = 1, 2, 3
"""Streams of `uniforms`: whether a draft stands, which token comes instead, and which one is drafted."""


class RejectionSampler:
    """Decides on drafts of rows that are drawn; where the best token is taken, a draft stands if it is that one, as in coupled verification."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def revise(
        self, token_ids: np.ndarray, logits: np.ndarray, rows: SampleRows, drafts: np.ndarray, odds: np.ndarray | None
    ) -> None:
        """Put the draft (int32 `[N]`, -1 for none) or what comes instead of it in the place of a row's own token in `token_ids`, int32 `[N]`,
        where it has one. `odds` float32 `[N, vocab]`, see `Drafts`; `logits` as for `Sampler.sample`."""
        is_drawn = rows.table.temperatures[rows.slots] > 0
        chosen = np.flatnonzero((drafts >= 0) & (token_ids != NO_TOKEN) & is_drawn)
        step = rows_per_chunk(logits.shape[1])
        for first in range(0, len(chosen), step):
            some = chosen[first : first + step]
            part = rows.only(some)
            numbers = part.table.seeds[part.slots], part.output_indices.astype(np.uint64)
            token_ids[some] = accepted_or_drawn(
                self._sampler.probabilities(logits[some], part),
                None if odds is None else odds[some],
                drafts[some],
                uniforms(*numbers, ACCEPTANCE),
                uniforms(*numbers, RESIDUAL),
            )


def accepted_or_drawn(
    p: np.ndarray, q: np.ndarray | None, drafts: np.ndarray, chances: np.ndarray, places: np.ndarray
) -> np.ndarray:
    """The token of each of R rows, int32: its draft (int32), or one of what is left. `p` float64 and `q` float `[R, vocab]` sum to 1 (None: all of q
    is on the draft); `chances` and `places` are uniform in [0, 1), float64 `[R]`."""
    rows = np.arange(len(p))
    q_of_draft = np.ones(len(p)) if q is None else q[rows, drafts].astype(np.float64)
    tokens = drafts.copy()
    refused = np.flatnonzero(chances * q_of_draft >= p[rows, drafts])
    if len(refused):
        if q is None:
            left = p[refused]
            left[np.arange(len(refused)), drafts[refused]] = 0.0
        else:
            left = np.maximum(p[refused] - q[refused], 0.0)
        is_left = left.any(axis=1)  # all but always: p and q may be the same but for rounding
        tokens[refused[is_left]] = drawn_at(left[is_left], places[refused[is_left]])
    return tokens


def drawn_at(weights: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The token at the place (float64 `[R]`, in [0, 1)) of each row of `weights`, float64 `[R, vocab]`, not all zero, laid end to end; int32 `[R]`."""
    running = np.cumsum(weights, axis=1)
    totals = running[:, -1]
    reached = np.minimum(places * totals, np.nextafter(totals, 0))
    found: np.ndarray = (running > reached[:, None]).argmax(axis=1).astype(np.int32)
    return found
