"""From a batch to the rows that are computed: where each begins, and which drafts it verifies."""

from collections.abc import Callable

import numpy as np

from model_worker.input_batch import Rows
from model_worker.slot_table import SlotTable
from model_worker.speculation.proposer import Drafts
from tessera.values.batch import ScheduledBatch

Propose = Callable[[np.ndarray, np.ndarray], Drafts]
"""`Proposer.propose`, of slots and rooms."""


def select_rows(batch: ScheduledBatch, slots: SlotTable, propose: Propose) -> tuple[Rows, np.ndarray]:
    """What the rows of a batch compute whose slots have not failed, drafts included, and which row of the batch each of them is (int64). The
    drafts are put into the slot table."""
    alive = np.arange(batch.num_rows)
    if slots.failures:
        alive = np.flatnonzero(~np.isin(batch.slots, list(slots.failures)))
    numbers, counts = batch.slots[alive].astype(np.int64), batch.num_scheduled_tokens[alive].astype(np.int64)
    starts = batch.context_lens[alive] - counts - slots.unused_room.since(batch.seen_step)[numbers]
    num_decodes = int(np.count_nonzero(alive < batch.num_decodes))
    drafts = _drafts(numbers, counts[:num_decodes] - 1, slots, propose)
    counts[:num_decodes] = 1 + drafts.counts[:num_decodes]
    num_singles = num_decodes - int(np.count_nonzero(drafts.counts))
    if num_singles < num_decodes:
        order = np.concatenate((np.argsort(drafts.counts[:num_decodes] > 0, kind="stable"), np.arange(num_decodes, len(alive))))
        alive, numbers, counts, starts, drafts = alive[order], numbers[order], counts[order], starts[order], drafts.of(order)
    context_lens = starts + counts
    samples = context_lens - drafts.counts == slots.num_ids[numbers]
    return Rows(numbers, counts, context_lens, samples, drafts, num_singles), alive


def _drafts(numbers: np.ndarray, rooms: np.ndarray, slots: SlotTable, propose: Propose) -> Drafts:
    """Drafts of the rows of these slots (int64 `[R]`), of which the first have `rooms` for some."""
    if not rooms.any():
        return Drafts.none(len(numbers))
    roomy = np.flatnonzero(rooms)
    proposed = propose(numbers[roomy], rooms[roomy])
    counts = np.zeros(len(numbers), np.int64)
    token_ids = np.full((len(numbers), proposed.token_ids.shape[1]), -1, np.int32)
    counts[roomy], token_ids[roomy] = proposed.counts, proposed.token_ids
    slots.place_drafts(numbers, counts, token_ids[token_ids >= 0])
    if proposed.odds is None or len(roomy) == len(numbers):
        return Drafts(counts, token_ids, proposed.odds)
    odds = np.zeros((len(numbers), *proposed.odds.shape[1:]), np.float32)
    odds[roomy] = proposed.odds
    return Drafts(counts, token_ids, odds)
