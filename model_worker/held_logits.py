"""The logits of a step that the host has: all of them where they were computed there, else those of the rows that need them."""

from dataclasses import dataclass

import numpy as np

from model_worker.sample_rows import SampleRows
from model_worker.sampler import sampled_logprobs
from tessera.values.logprobs import Logprobs

Which = np.ndarray | slice
"""Rows, by ascending numbers (int64) or as a slice of all."""

EVERY_ROW = slice(None)


@dataclass(frozen=True, slots=True, eq=False)
class HeldLogits:
    """`values` float32 `[H, vocab]`, of the `rows` among those of a step."""

    rows: Which
    values: np.ndarray

    def logprobs(self, token_ids: np.ndarray, rows: SampleRows) -> Logprobs | None:
        """Those that the rows of the step want which have a token, int32 `[N]` (not NO_TOKEN): all these are among the rows held. None where no row
        does."""
        found = sampled_logprobs(self.values, token_ids[self.rows], rows.only(self.rows))
        if found is None:
            return None
        counts, ranks = np.zeros(len(token_ids), np.int32), np.zeros(len(token_ids), np.int32)
        counts[self.rows], ranks[self.rows] = found.counts, found.ranks
        return Logprobs(counts, found.token_ids, found.logprobs, ranks)
