"""Whether a batch fits what a worker holds, decided before anything changes. Raises BatchRefused, naming the first thing wrong."""

from collections.abc import Callable
from typing import NoReturn

import numpy as np

from model_worker.batch_refused import BatchRefused
from model_worker.move_check import MoveCheck
from model_worker.slot_columns import SlotColumns
from model_worker.slot_table import SlotTable
from tessera.values.batch import ScheduledBatch, SlotEntry
from tessera.values.model import WorkerDescription


def check_batch(batch: ScheduledBatch, slots: SlotTable, worker: WorkerDescription, last_step: int) -> None:
    """Refuse a batch beyond limits, out of order, or at odds with the slots. `last_step` is the highest step executed so far."""

    def refuse(reason: str) -> NoReturn:
        raise BatchRefused(batch.step_id, reason)

    if batch.step_id <= last_step:
        refuse(f"step_id {batch.step_id} is not above {last_step}, the last one executed")
    rows, tokens = batch.num_rows, batch.total_tokens
    if rows > worker.limits.max_num_seqs:
        refuse(f"{rows} rows, max_num_seqs is {worker.limits.max_num_seqs}")
    if tokens > worker.limits.max_num_batched_tokens:
        refuse(f"{tokens} positions, max_num_batched_tokens is {worker.limits.max_num_batched_tokens}")
    columns = SlotColumns.of(slots, batch.seen_step)
    for drop in batch.drops:
        if drop.slot >= slots.num_slots:
            refuse(f"drop of slot {drop.slot}, the worker has {slots.num_slots}")
        if slots.holds(drop.slot, drop.request_id, drop.attempt):
            columns.held[drop.slot] = columns.swapped[drop.slot] = False
            columns.unused_room[drop.slot] = 0
    if batch.moves_blocks and (problem := MoveCheck(batch, columns, slots, worker.geometry).problem()):
        refuse(problem)
    if batch.is_dummy_run:
        _check_dummy_run(batch, worker, refuse)
        return
    failed = {slot for slot in slots.failures if columns.held[slot]}
    for entry in batch.entries:
        problem = _entry_problem(entry, columns, slots, worker)
        if problem:
            refuse(f"entry into slot {entry.slot}: {problem}")
        columns.held[entry.slot] = True
        columns.num_ids[entry.slot] = len(entry.token_ids)
        columns.computed_lens[entry.slot] = entry.num_cached_tokens
        columns.table_lens[entry.slot] = len(entry.block_table)
    if rows:
        _check_rows(batch, columns, slots, worker, refuse)
        alive = ~np.isin(batch.slots, list(failed)) if failed else np.ones(rows, dtype=np.bool_)
        _check_positions(batch, alive, columns, worker, refuse)


def _check_dummy_run(batch: ScheduledBatch, worker: WorkerDescription, refuse: Callable[[str], NoReturn]) -> None:
    """Rows that could be somebody's, and nothing that touches anybody."""
    counts, context_lens = batch.num_scheduled_tokens, batch.context_lens
    if batch.entries or len(batch.new_block_ids):
        refuse("a dummy run with entries or new blocks")
    if not batch.num_rows:
        refuse("a dummy run without rows")
    if counts.min() < 1:
        refuse("a dummy run with a row of no position")
    if (counts > context_lens).any() or context_lens.max() > worker.model.max_model_len:
        refuse(f"a dummy run with a context_len below its row's positions or above max_model_len, {worker.model.max_model_len}")


def _entry_problem(entry: SlotEntry, columns: SlotColumns, slots: SlotTable, worker: WorkerDescription) -> str:
    """What is wrong with an entry; empty when nothing is."""
    num_ids, num_blocks = len(entry.token_ids), worker.geometry.num_blocks
    if entry.slot >= slots.num_slots:
        return f"the worker has {slots.num_slots} slots"
    if columns.held[entry.slot]:
        return "the slot is held"
    if not 1 <= entry.prompt_len <= num_ids:
        return f"prompt_len {entry.prompt_len} with {num_ids} token ids"
    if num_ids > worker.model.max_model_len:
        return f"{num_ids} token ids, max_model_len is {worker.model.max_model_len}"
    if entry.token_ids.min() < 0 or entry.token_ids.max() >= worker.model.vocab_size:
        return f"a token id outside the vocabulary of {worker.model.vocab_size}"
    if entry.num_cached_tokens >= num_ids:
        return f"num_cached_tokens {entry.num_cached_tokens} leaves nothing of {num_ids} token ids to compute"
    if len(entry.block_table) > slots.block_tables.shape[1]:
        return f"{len(entry.block_table)} blocks, a sequence has at most {slots.block_tables.shape[1]}"
    if len(entry.block_table) * worker.geometry.block_size < entry.num_cached_tokens:
        return f"{len(entry.block_table)} blocks do not cover {entry.num_cached_tokens} cached tokens"
    if len(entry.block_table) and not 0 <= entry.block_table.min() <= entry.block_table.max() < num_blocks:
        return f"a block id outside the pool of {num_blocks} blocks"
    return ""


def _check_rows(
    batch: ScheduledBatch, columns: SlotColumns, slots: SlotTable, worker: WorkerDescription, refuse: Callable[[str], NoReturn]
) -> None:
    """Slots that exist, are held and come once; blocks of the pool; decodes with room for no more drafts than the worker makes."""
    if batch.slots.min() < 0 or batch.slots.max() >= slots.num_slots:
        refuse(f"a row's slot is not among the {slots.num_slots} of the worker")
    if not (held := columns.held[batch.slots]).all():
        refuse(f"row {_first(~held)} names slot {batch.slots[_first(~held)]}, which is free")
    if (swapped := columns.swapped[batch.slots]).any():
        refuse(f"row {_first(swapped)} names slot {batch.slots[_first(swapped)]}, which is swapped out")
    if np.bincount(batch.slots).max() > 1:
        refuse(f"slot {np.bincount(batch.slots).argmax()} has two rows")
    if batch.num_scheduled_tokens.min() < 1:
        refuse(f"row {batch.num_scheduled_tokens.argmin()} computes {batch.num_scheduled_tokens.min()} positions")
    drafts_max = worker.limits.num_speculative_tokens
    if batch.num_decodes and batch.num_scheduled_tokens[: batch.num_decodes].max() > 1 + drafts_max:
        row = batch.num_scheduled_tokens[: batch.num_decodes].argmax()
        if not drafts_max:
            refuse(f"row {row} is a decode of more than one position: this worker makes no drafts")
        refuse(f"row {row} has room for {batch.num_scheduled_tokens[row] - 1} drafts, this worker makes at most {drafts_max}")
    if (
        len(batch.new_block_ids)
        and not 0 <= batch.new_block_ids.min() <= batch.new_block_ids.max() < worker.geometry.num_blocks
    ):
        refuse(f"a new block id outside the pool of {worker.geometry.num_blocks} blocks")
    if len(batch.new_block_ids) > 1 and len(np.unique(batch.new_block_ids)) < len(batch.new_block_ids):
        refuse("a new block is given away twice")
    table_lens = columns.table_lens[batch.slots] + batch.new_block_counts
    if table_lens.max() > slots.block_tables.shape[1]:
        refuse(f"row {table_lens.argmax()} has {table_lens.max()} blocks, at most {slots.block_tables.shape[1]} are possible")


def _check_positions(
    batch: ScheduledBatch, alive: np.ndarray, columns: SlotColumns, worker: WorkerDescription, refuse: Callable[[str], NoReturn]
) -> None:
    """Rows (those of slots that have not failed) start where their KV ends, and stay within ids, blocks and model. A decode with room for
    drafts starts at the last id."""
    context_lens = batch.context_lens - columns.unused_room[batch.slots]
    starts, computed = context_lens - batch.num_scheduled_tokens, columns.computed_lens[batch.slots]
    if (wrong := alive & (starts != computed)).any():
        row = _first(wrong)
        refuse(f"row {row} starts at {starts[row]}, but slot {batch.slots[row]} has computed {computed[row]}")
    known = columns.num_ids[batch.slots]
    has_room = (np.arange(batch.num_rows) < batch.num_decodes) & (batch.num_scheduled_tokens > 1)
    if (wrong := alive & has_room & (starts != known - 1)).any():
        row = _first(wrong)
        refuse(f"row {row} has room for drafts at {starts[row]}, but slot {batch.slots[row]} holds {known[row]} token ids")
    if (wrong := alive & ~has_room & (context_lens > known)).any():
        row = _first(wrong)
        refuse(f"row {row} has context_len {context_lens[row]}, but slot {batch.slots[row]} holds {known[row]} token ids")
    if (wrong := alive & (context_lens > worker.model.max_model_len)).any():
        row = _first(wrong)
        refuse(f"row {row} has context_len {context_lens[row]}, max_model_len is {worker.model.max_model_len}")
    covered = (columns.table_lens[batch.slots] + batch.new_block_counts) * worker.geometry.block_size
    if (wrong := alive & (context_lens > covered)).any():
        row = _first(wrong)
        refuse(f"row {row} has context_len {context_lens[row]}, but its blocks cover {covered[row]}")


def _first(mask: np.ndarray) -> int:
    return int(mask.argmax())
