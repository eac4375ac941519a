"""Rows for the sampler from plain Python: one slot for each row."""

from collections.abc import Sequence

import numpy as np

from model_worker.sample_rows import SampleRows
from model_worker.sampling_table import SamplingTable
from tessera.values.sampling import SamplingParams


def sample_rows(
    params: Sequence[SamplingParams],
    output_indices: Sequence[int],
    vocab_size: int,
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    outputs: Sequence[Sequence[int]] | None = None,
) -> SampleRows:
    """Rows that draw the given output tokens. Without `prompts` and `outputs` there is no history to read, only the numbers."""
    table = SamplingTable(len(params), vocab_size)
    for slot, row_params in enumerate(params):
        table.set(slot, row_params)
    prompts, outputs = prompts or [()] * len(params), outputs or [()] * len(params)
    histories = [[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)]
    token_ids = np.zeros((len(params), max(1, *map(len, histories)) if histories else 1), np.int32)
    for row, history in zip(token_ids, histories, strict=True):
        row[: len(history)] = history
    prompt_lens = np.array([len(prompt) for prompt in prompts], np.int64)
    return SampleRows(
        table=table,
        token_ids=token_ids,
        slots=np.arange(len(params)),
        prompt_lens=prompt_lens,
        history_lens=prompt_lens + np.array(output_indices, np.int64),
        samples=np.ones(len(params), np.bool_),
    )
