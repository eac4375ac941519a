"""Two batches as one: prompts that came late join the batch that waits, and both cost one pass over the weights.

A row's numbers are its own, so one pass gives what two would. What differs is the order of what surrounds it: all drops come before all entries, and
everybody's KV is written before anybody attends. Hence `can_join`.
"""

from dataclasses import replace

import numpy as np

from tessera.values.batch import RowError, ScheduledBatch, ScheduledBatchOutput
from tessera.values.logprobs import PromptLogprobs


def can_join(first: ScheduledBatch, second: ScheduledBatch) -> bool:
    """Whether `second` may be computed with `first`, the one before it: it is prompts alone, neither moves KV, and it does not give up a slot of
    `first`, whose blocks may be its own already. Neither has drafts."""
    if (first.epoch, first.nonce) != (second.epoch, second.nonce):
        return False
    if not (first.num_rows and second.num_rows) or first.is_dummy_run or second.is_dummy_run:
        return False
    if (
        second.num_decodes
        or first.moves_blocks
        or second.moves_blocks
        or (first.num_scheduled_tokens[: first.num_decodes] > 1).any()
    ):
        return False
    taken = {*first.slots.tolist(), *(entry.slot for entry in first.entries)}
    return taken.isdisjoint(drop.slot for drop in second.drops) and taken.isdisjoint(second.slots.tolist())


def joined(first: ScheduledBatch, second: ScheduledBatch) -> ScheduledBatch:
    """Both, under the number of the second: the rows of `first`, then those of `second`."""
    return replace(
        second,
        entries=first.entries + second.entries,
        drops=first.drops + second.drops,
        slots=np.concatenate((first.slots, second.slots)),
        num_scheduled_tokens=np.concatenate((first.num_scheduled_tokens, second.num_scheduled_tokens)),
        context_lens=np.concatenate((first.context_lens, second.context_lens)),
        new_block_counts=np.concatenate((first.new_block_counts, second.new_block_counts)),
        new_block_ids=np.concatenate((first.new_block_ids, second.new_block_ids)),
        num_decodes=first.num_decodes,
        seen_step=first.seen_step,
    )


def parted(output: ScheduledBatchOutput, first: ScheduledBatch) -> tuple[ScheduledBatchOutput, ScheduledBatchOutput]:
    """What a pass over `first` and another gave, as two outputs. The time it took is the other's: of `first` none is told."""
    rows = first.num_rows
    tokens, all_tokens = int(output.token_counts[:rows].sum()), len(output.token_ids)
    logprobs, prompts = output.logprobs, output.prompt_logprobs
    early, late = (
        [error for error in output.row_errors if error.row < rows],
        [error for error in output.row_errors if error.row >= rows],
    )
    return (
        replace(
            output,
            step_id=first.step_id,
            token_counts=output.token_counts[:rows],
            token_ids=output.token_ids[:tokens],
            row_errors=tuple(early),
            compute_us=0,
            draft_counts=output.draft_counts[:rows],
            logprobs=None if logprobs is None else logprobs.between(0, tokens),
            prompt_logprobs=None if prompts is None else _rows_between(prompts, 0, rows),
        ),
        replace(
            output,
            token_counts=output.token_counts[rows:],
            token_ids=output.token_ids[tokens:],
            row_errors=tuple(RowError(error.row - rows, error.message) for error in late),
            draft_counts=output.draft_counts[rows:],
            logprobs=None if logprobs is None else logprobs.between(tokens, all_tokens),
            prompt_logprobs=None if prompts is None else _rows_between(prompts, rows, len(prompts.row_counts)),
        ),
    )


def _rows_between(prompts: PromptLogprobs, first: int, end: int) -> PromptLogprobs:
    counts = prompts.row_counts
    return PromptLogprobs(counts[first:end], prompts.tokens.between(int(counts[:first].sum()), int(counts[:end].sum())))
