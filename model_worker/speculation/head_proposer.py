"""Drafts from layers on top of the model's hidden states: multi-token prediction, EAGLE.

At the end of a step the layers compute what they keep of the positions that the model kept, whose next tokens are known now; what they have at the
last one gives the first draft. Each further draft is one more pass of the layers, over the draft before it and what they had there, in
place of the model's hidden state. Those passes write KV behind the kept positions, which the next step writes again.

The KV of a block's last position is made with the token behind it. Where a block is shared (prefix caching, forks) that token was another
sequence's, and where a sequence begins behind shared blocks the layers but the first take zeros for what was before: both may cost a draft, never a
token.
"""

import numpy as np
import torch
from torch import Tensor

from model_worker.input_batch import Spans
from model_worker.kv_pool import KVPool
from model_worker.placement import ON_CPU, Placement
from model_worker.sampling_table import SamplingTable
from model_worker.slot_table import SlotTable
from model_worker.speculation.draft_draws import DraftDraws
from model_worker.speculation.draft_head import DraftHead
from model_worker.speculation.draft_rows import DraftRows
from model_worker.speculation.proposer import Drafts, Follower, Passed

_NO_LOGITS = np.empty(0, np.int64)


class HeadProposer(Follower):
    """See `Follower`. `kv` is the pool of the head's layers, which lie at `placement`, `num_slots` that of the slot table. A slot of which it does not know what the layers had
    at the last position gets no drafts: one that has just entered, or whose pass it was not told of."""

    def __init__(self, head: DraftHead, kv: KVPool, num_slots: int, draws: DraftDraws, placement: Placement = ON_CPU) -> None:
        self.taps = head.taps
        self._head = head
        self._kv = kv
        self._draws = draws
        self._take = placement.take
        with placement.in_force():
            self._last = torch.zeros(head.num_layers, num_slots, head.hidden_size)  # what each layer had at the last position
        self._lens = np.zeros(num_slots, np.int64)  # positions up to and with that one
        self._entry_counts = np.zeros(num_slots, np.int64)  # who held the slot then

    @torch.inference_mode()
    def follow(self, passed: Passed, table: SlotTable) -> None:
        assert passed.hidden is not None
        rows, num_singles = passed.singles_first()
        spans = Spans(rows.slots, rows.starts, rows.counts)
        batch = spans.batch(table, self._kv.block_size, num_singles, _NO_LOGITS, ahead=1)
        ends = np.cumsum(rows.counts)
        places = np.arange(ends[-1]) + np.repeat(rows.offsets - (ends - rows.counts), rows.counts)
        hidden = self._head.enter(passed.hidden.index_select(0, self._at(places)))
        slots, knows = self._at(rows.slots), self._at(self._knows(rows.slots, rows.starts, table))
        before = self._last[:-1, slots] * knows.view(1, -1, 1)
        layers = self._head.forward(batch, hidden, before, self._kv)
        self._last[:, slots] = layers[:, self._at(ends - 1)]
        self._lens[rows.slots] = rows.starts + rows.counts
        self._entry_counts[rows.slots] = table.entry_counts[rows.slots]

    @torch.inference_mode()
    def propose(self, slots: np.ndarray, rooms: np.ndarray, table: SlotTable, sampling: SamplingTable) -> Drafts:
        growing = DraftRows(len(slots), int(rooms.max(initial=0)))
        rows = np.flatnonzero(self._knows(slots, table.num_ids[slots] - 1, table) & (rooms > 0))
        layers = self._last[:, self._at(slots[rows])]
        for ahead in range(int(rooms[rows].max(initial=0))):
            layer = ahead % self._head.num_layers
            logits = self._head.logits(layers[layer], layer)
            drawn = growing.add(rows, *self._draws.draw(logits, slots[rows], ahead, table, sampling))
            going_on = drawn & (rooms[rows] > ahead + 1)
            rows, layers = rows[going_on], layers[:, self._at(np.flatnonzero(going_on))]
            if not len(rows):
                break
            growing.place(rows, slots[rows], table)
            layers = self._further(slots[rows], ahead, layers, layer, table)
        return growing.drafts

    def _further(self, slots: np.ndarray, ahead: int, layers: Tensor, layer: int, table: SlotTable) -> Tensor:
        """What the layers have at the position in front of draft number `ahead`, from 0, given what they had one before, of which that of
        `layer` stands in for the model's hidden state; `[n, R, hidden_size]` both."""
        spans = Spans(slots, table.num_ids[slots] - 1 + ahead, np.ones(len(slots), np.int64))
        batch = spans.batch(table, self._kv.block_size, len(slots), _NO_LOGITS, ahead=1)
        return self._head.forward(batch, layers[layer], layers[:-1], self._kv)

    def _at(self, values: np.ndarray) -> Tensor:
        """Where the layers are."""
        return self._take(torch.from_numpy(values))

    def _knows(self, slots: np.ndarray, lens: np.ndarray, table: SlotTable) -> np.ndarray:
        """Whether the layers have come up to these lengths with whoever holds the slots now, bool `[R]`."""
        known: np.ndarray = (self._lens[slots] == lens) & (self._entry_counts[slots] == table.entry_counts[slots])
        return known
