"""Batches of single positions, padded to a number of rows.

A row of padding is nobody's: its one position is the first of a context of its own, whose only block is the null block. So it reads and writes
there alone, and costs as little as a row can.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from model_worker.batch import Batch


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """What padded batches have in common: contexts of up to `max_blocks` blocks of `block_size` tokens, in a pool whose null block is
    `null_block`."""

    max_blocks: int
    block_size: int
    null_block: int

    @property
    def max_context(self) -> int:
        """Tokens that a table of full width holds."""
        return self.max_blocks * self.block_size

    def pad(self, batch: Batch, size: int) -> Batch:
        """A batch of R single positions, as one of `size` rows, R at most, with logits for all rows."""
        more = size - batch.num_rows
        assert is_decode_only(batch) and more >= 0
        return Batch(
            input_ids=_longer(batch.input_ids, more, 0),
            positions=_longer(batch.positions, more, 0),
            slot_mapping=_longer(batch.slot_mapping, more, self.null_block * self.block_size),
            cu_seqlens_q=torch.arange(size + 1, dtype=torch.int32),
            context_lens=_longer(batch.context_lens, more, 1),
            block_tables=functional.pad(batch.block_tables[:, : self.max_blocks], (0, 0, 0, more), value=self.null_block),
            num_decodes=size,
            logits_rows=torch.arange(size),
        )

    def blank(self, size: int) -> Batch:
        """`size` rows of padding, with room and bounds for contexts of full length: what is recorded, so that whatever depends on the longest context
        of a batch is made for the longest there can be, and costs little until there is one."""
        return Batch(
            input_ids=torch.zeros(size, dtype=torch.int64),
            positions=torch.zeros(size, dtype=torch.int64),
            slot_mapping=torch.full((size,), self.null_block * self.block_size),
            cu_seqlens_q=torch.arange(size + 1, dtype=torch.int32),
            context_lens=torch.ones(size, dtype=torch.int32),
            block_tables=torch.full((size, self.max_blocks), self.null_block, dtype=torch.int32),
            num_decodes=size,
            logits_rows=torch.arange(size),
            max_context_len=self.max_context,
        )


def is_decode_only(batch: Batch) -> bool:
    """Whether every row has one position, and its logits are wanted, in the order of the rows."""
    rows = batch.num_rows
    return batch.num_decodes == rows == len(batch.logits_rows) and bool((batch.logits_rows == torch.arange(rows)).all())


def _longer(values: Tensor, more: int, value: int) -> Tensor:
    return functional.pad(values, (0, more), value=value)
