"""What the rows of a pass gave."""

from dataclasses import dataclass, replace

import numpy as np

from model_worker.sampler import NO_TOKEN
from tessera.values.logprobs import Logprobs, PromptLogprobs


@dataclass(frozen=True, slots=True, eq=False)
class RowResults:
    """Of R rows: `token_ids` int32 `[R, W]`, NO_TOKEN behind a row's tokens; `draft_counts` int32 `[R]`, how many drafts each verified;
    `logprobs` of the tokens, row after row."""

    token_ids: np.ndarray
    draft_counts: np.ndarray
    logprobs: Logprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None

    @classmethod
    def none(cls, num_rows: int) -> "RowResults":
        """Nothing."""
        return cls(np.full((num_rows, 1), NO_TOKEN, np.int32), np.zeros(num_rows, np.int32))

    @property
    def token_counts(self) -> np.ndarray:
        """How many tokens each row has, int64 `[R]`."""
        counts: np.ndarray = np.count_nonzero(self.token_ids != NO_TOKEN, axis=1)
        return counts

    def of_batch(self, order: np.ndarray, num_rows: int) -> "RowResults":
        """Those of all `num_rows` rows of a batch, of which these are the rows `order` (int64 `[R]`). Rows with prompt log-probabilities must be
        in ascending order."""
        token_ids = np.full((num_rows, self.token_ids.shape[1]), NO_TOKEN, np.int32)
        draft_counts = np.zeros(num_rows, np.int32)
        token_ids[order], draft_counts[order] = self.token_ids, self.draft_counts
        logprobs, prompt_logprobs = self.logprobs, self.prompt_logprobs
        if logprobs is not None:
            logprobs = logprobs.of(np.argsort(np.repeat(order, self.token_counts), kind="stable"))
        if prompt_logprobs is not None:
            row_counts = np.zeros(num_rows, dtype=np.int32)
            row_counts[order] = prompt_logprobs.row_counts
            prompt_logprobs = replace(prompt_logprobs, row_counts=row_counts)
        return RowResults(token_ids, draft_counts, logprobs, prompt_logprobs)
