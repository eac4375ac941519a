"""From slots and rows to the flat tensors of one forward pass."""

from dataclasses import dataclass

import numpy as np
import torch

from model_worker.batch import Batch
from model_worker.kv_pool import KVPool
from model_worker.slot_table import SlotTable
from model_worker.speculation.proposer import Drafts


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows of one forward pass, decodes first; int64 `[R]` each. `samples` (bool): the row's last position gives a token,
    as do the `drafts.counts` positions before it. The drafts of a row lie in the slot table too, behind the known ids. The first
    `num_singles` rows have one position, the next ones drafts, and the others none."""

    slots: np.ndarray
    num_scheduled_tokens: np.ndarray
    context_lens: np.ndarray
    samples: np.ndarray
    drafts: Drafts
    num_singles: int

    @property
    def logits_counts(self) -> np.ndarray:
        """How many of each row's last positions have logits: one, and one for every draft."""
        return 1 + self.drafts.counts

    def only(self, row: int) -> "Rows":
        """One row by itself."""
        one = slice(row, row + 1)
        return Rows(
            slots=self.slots[one],
            num_scheduled_tokens=self.num_scheduled_tokens[one],
            context_lens=self.context_lens[one],
            samples=self.samples[one],
            drafts=self.drafts.of(np.array([row])),
            num_singles=int(row < self.num_singles),
        )

    def without_drafts(self) -> "Rows":
        """The rows as they would be without speculation."""
        return Rows(
            slots=self.slots,
            num_scheduled_tokens=self.num_scheduled_tokens - self.drafts.counts,
            context_lens=self.context_lens - self.drafts.counts,
            samples=self.samples,
            drafts=Drafts.none(len(self.slots)),
            num_singles=self.num_singles + int(np.count_nonzero(self.drafts.counts)),
        )


def build_dummy_batch(counts: np.ndarray, context_lens: np.ndarray, num_decodes: int, kv: KVPool) -> Batch:
    """Rows of this size (int64 `[R]` each) that belong to nobody. They read and write the null block alone, so here entries of
    `slot_mapping` are equal; whoever runs it clears that block afterwards. Decodes with room for drafts count as such up to the first of
    more than one position."""
    is_single = counts[:num_decodes] == 1
    ends = np.cumsum(counts)
    positions = np.arange(ends[-1]) + np.repeat(context_lens - ends, counts)
    blocks_max = -(-int(context_lens.max()) // kv.block_size)
    return Batch(
        input_ids=torch.zeros(len(positions), dtype=torch.int64),
        positions=torch.from_numpy(positions),
        slot_mapping=torch.from_numpy(kv.null_block * kv.block_size + positions % kv.block_size),
        cu_seqlens_q=torch.from_numpy(np.concatenate(([0], ends)).astype(np.int32)),
        context_lens=torch.from_numpy(context_lens.astype(np.int32)),
        block_tables=torch.full((len(counts), blocks_max), kv.null_block, dtype=torch.int32),
        num_decodes=num_decodes if is_single.all() else int(is_single.argmin()),
        logits_rows=torch.from_numpy(ends - 1),
    )


def build_batch(rows: Rows, slots: SlotTable, block_size: int, also: np.ndarray) -> Batch:
    """The batch that computes `rows`, with the logits of every row's last `logits_counts` positions, and behind them those of the tokens
    `also` of the pass (int64); its tensors are new. R >= 1."""
    if rows.num_singles == len(rows.slots):
        lasts = np.arange(len(rows.slots))
    else:
        logits_ends = np.cumsum(rows.logits_counts)
        ends = np.cumsum(rows.num_scheduled_tokens)
        lasts = np.arange(logits_ends[-1]) + np.repeat(ends - logits_ends, rows.logits_counts)
    spans = Spans(rows.slots, rows.context_lens - rows.num_scheduled_tokens, rows.num_scheduled_tokens)
    return spans.batch(slots, block_size, rows.num_singles, np.concatenate((lasts, also)) if len(also) else lasts)


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Positions `[starts[i], starts[i] + counts[i])` of `slots[i]`, which has blocks for them; int64 `[R]` each, counts >= 1."""

    slots: np.ndarray
    starts: np.ndarray
    counts: np.ndarray

    def slot_mapping(self, table: SlotTable, block_size: int) -> np.ndarray:
        """Where these positions lie, int64 `[T]`, see `Batch`."""
        positions, slot_of = self._places()
        return _slot_mapping(table, slot_of, positions, block_size)

    def _places(self) -> tuple[np.ndarray, np.ndarray]:
        """Positions, and whose each is, int64 `[T]`."""
        if self.counts.max() == 1:
            return self.starts, self.slots
        ends = np.cumsum(self.counts)
        row_of = np.repeat(np.arange(len(self.counts)), self.counts)
        return np.arange(len(row_of)) + (self.starts + self.counts - ends)[row_of], self.slots[row_of]

    def batch(self, table: SlotTable, block_size: int, num_singles: int, logits_rows: np.ndarray, ahead: int = 0) -> Batch:
        """The batch that computes them, of which the first `num_singles` are single positions, with the logits of these tokens of the pass
        (int64). At each position goes in the id that the slot has `ahead` positions further on. Its tensors are new."""
        ends, context_lens = np.cumsum(self.counts), self.starts + self.counts
        positions, slot_of = self._places()
        max_context_len = int(context_lens.max())
        blocks_max = -(-max_context_len // block_size)
        return Batch(
            input_ids=torch.from_numpy(table.token_ids[slot_of, positions + ahead].astype(np.int64)),
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(_slot_mapping(table, slot_of, positions, block_size)),
            cu_seqlens_q=torch.from_numpy(np.concatenate(([0], ends)).astype(np.int32)),
            context_lens=torch.from_numpy(context_lens.astype(np.int32)),
            block_tables=torch.from_numpy(table.block_tables[self.slots, :blocks_max]),
            num_decodes=num_singles,
            logits_rows=torch.from_numpy(logits_rows),
            max_query_len=int(self.counts.max()),
            max_context_len=max_context_len,
        )


def _slot_mapping(table: SlotTable, slot_of: np.ndarray, positions: np.ndarray, block_size: int) -> np.ndarray:
    block_ids = table.block_tables[slot_of, positions // block_size].astype(np.int64)
    mapping: np.ndarray = block_ids * block_size + positions % block_size
    return mapping
