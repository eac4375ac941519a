"""What one forward pass computes, as flat tensors: every row's new positions one after the other, without padding."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """R rows with T new positions in all; decodes lead. Tensors lie on the host, where they are made and where kernels plan, and are not
    mutated; only the batch that a graph is captured with lies on the model's device, and is written between two replays.

    A row computes KV positions `[context_len - n, context_len)`, n >= 1 being its number of queries, and attends to
    `[0, context_len)` through its block table; positions before its own must lie in the pool already, or be computed by
    another row of this batch (a layer stores all keys and values before any row attends). Tables of two rows may share blocks
    for reading, but no two entries of `slot_mapping` are equal (a dummy run's are, all in the null block).

    - `input_ids` int64 `[T]`, `positions` int64 `[T]`
    - `slot_mapping` int64 `[T]`: where a position's key and value go, block_id * block_size + offset
    - `cu_seqlens_q` int32 `[R + 1]`: row i owns the tokens `[cu_seqlens_q[i], cu_seqlens_q[i + 1])`
    - `context_lens` int32 `[R]`: KV length after this step
    - `block_tables` int32 `[R, max_blocks]`: covers context_len; entries behind that are padding, any value
    - `num_decodes`: leading rows with exactly one query
    - `logits_rows` int64 `[S]`: indices into T of the tokens whose logits are wanted, in the order wanted
    - `max_query_len`, `max_context_len`: bounds of the queries and of the context of a row; 0: the largest there is
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    cu_seqlens_q: Tensor
    context_lens: Tensor
    block_tables: Tensor
    num_decodes: int
    logits_rows: Tensor
    max_query_len: int = 0
    max_context_len: int = 0

    def __post_init__(self) -> None:
        rows, tokens = self.context_lens.numel(), self.input_ids.numel()
        assert 0 <= self.num_decodes <= rows and rows >= 1
        assert self.cu_seqlens_q.shape == (rows + 1,) and self.block_tables.shape[0] == rows
        assert self.positions.shape == self.slot_mapping.shape == (tokens,)
        for tensor in (self.input_ids, self.positions, self.slot_mapping, self.logits_rows):
            assert tensor.dtype == torch.int64, tensor.dtype
        for tensor in (self.cu_seqlens_q, self.context_lens, self.block_tables):
            assert tensor.dtype == torch.int32, tensor.dtype
        if not self.max_query_len:
            object.__setattr__(self, "max_query_len", int(self.cu_seqlens_q.diff().max()))
        if not self.max_context_len:
            object.__setattr__(self, "max_context_len", int(self.context_lens.max()))

    @property
    def num_rows(self) -> int:
        """R, the number of rows."""
        return self.context_lens.numel()

    @property
    def num_tokens(self) -> int:
        """T, the positions computed by all rows."""
        return self.input_ids.numel()
