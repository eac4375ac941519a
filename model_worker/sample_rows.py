"""The rows of logits that one call of the sampler works on: whose parameters each takes, and which tokens come before it."""

from dataclasses import dataclass

import numpy as np

from model_worker.sampling_table import SamplingTable


@dataclass(frozen=True, slots=True, eq=False)
class SampleRows:
    """N rows; nothing is mutated.

    Row i draws the token that follows `token_ids[slots[i], :history_lens[i]]`, whose first `prompt_lens[i]` ids are the prompt, with the
    parameters of `slots[i]` in `table`. A slot may have several rows: a draft's row has a longer history, the drafts before it
    included, which lie behind the slot's own ids. So what a rule sees there is what it would see had they been drawn.

    - `slots`, `prompt_lens`, `history_lens` int64 `[N]`
    - `token_ids` int32 `[num_slots, ids_max]`
    - `samples` (bool `[N]`): others give no token, only the check of their logits
    """

    table: SamplingTable
    token_ids: np.ndarray
    slots: np.ndarray
    prompt_lens: np.ndarray
    history_lens: np.ndarray
    samples: np.ndarray

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def output_indices(self) -> np.ndarray:
        """Which output token of its request each row draws, from 0. int64 `[N]`."""
        indices: np.ndarray = self.history_lens - self.prompt_lens
        return indices

    def only(self, rows: np.ndarray | slice) -> "SampleRows":
        """Some of the rows, by number or as a slice."""
        return SampleRows(
            self.table,
            self.token_ids,
            self.slots[rows],
            self.prompt_lens[rows],
            self.history_lens[rows],
            self.samples[rows],
        )
