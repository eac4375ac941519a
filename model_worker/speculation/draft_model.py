"""Drafts from a smaller model with the same vocabulary.

It has KV of its own under the same block ids. Every position that the model computes it computes too, at the end of the step, so a block that is
shared, swapped or copied has both. What it computed while it was drafting is kept as far as the drafts turned out right.
"""

import numpy as np

from model_worker.input_batch import Spans
from model_worker.kv_pool import KVPool
from model_worker.models.causal_lm import CausalLM
from model_worker.sampling_table import SamplingTable
from model_worker.slot_table import SlotTable
from model_worker.speculation.draft_draws import DraftDraws
from model_worker.speculation.draft_rows import DraftRows
from model_worker.speculation.proposer import Drafts, Follower, Passed

_NO_LOGITS = np.empty(0, np.int64)


class DraftModelProposer(Follower):
    """See `Follower`. `model` computes on `kv`; `num_slots` is that of the slot table."""

    def __init__(self, model: CausalLM, kv: KVPool, num_slots: int, draws: DraftDraws) -> None:
        self._model = model
        self._kv = kv
        self._draws = draws
        # What drafting has computed since the model's last step: so many positions, from where, and who held the slot.
        self._counts, self._starts, self._entry_counts = (np.zeros(num_slots, np.int64) for _ in range(3))

    def propose(self, slots: np.ndarray, rooms: np.ndarray, table: SlotTable, sampling: SamplingTable) -> Drafts:
        growing, rows = DraftRows(len(slots), int(rooms.max(initial=0))), np.flatnonzero(rooms > 0)
        self._counts[slots] = 0
        self._starts[slots], self._entry_counts[slots] = table.num_ids[slots] - 1, table.entry_counts[slots]
        for ahead in range(int(rooms.max(initial=0))):
            spans = Spans(slots[rows], self._starts[slots[rows]] + ahead, np.ones(len(rows), np.int64))
            batch = spans.batch(table, self._kv.block_size, len(rows), np.arange(len(rows)))
            logits = self._model.forward(batch, self._kv)
            self._counts[slots[rows]] += 1
            drawn = growing.add(rows, *self._draws.draw(logits, slots[rows], ahead, table, sampling))
            rows = rows[drawn & (rooms[rows] > ahead + 1)]
            if not len(rows):
                break
            growing.place(rows, slots[rows], table)
        return growing.drafts

    def follow(self, passed: Passed, table: SlotTable) -> None:
        slots = passed.slots
        is_same = (self._starts[slots] == passed.starts) & (self._entry_counts[slots] == table.entry_counts[slots])
        # A pass keeps a position more than it accepts drafts, the first of which was in front of all drafts: so many were right.
        num_right = np.where(is_same, np.minimum(self._counts[slots], passed.counts), 0)
        self._counts[slots] = 0
        left = np.flatnonzero(num_right < passed.counts)
        if not len(left):
            return
        order = left[np.argsort((passed.counts - num_right)[left] > 1, kind="stable")]
        spans = Spans(slots[order], (passed.starts + num_right)[order], (passed.counts - num_right)[order])
        num_singles = int(np.count_nonzero(spans.counts == 1))
        self._model.forward(spans.batch(table, self._kv.block_size, num_singles, _NO_LOGITS), self._kv)
