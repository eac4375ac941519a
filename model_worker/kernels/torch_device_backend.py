"""Plain torch on a GPU: the reference backend, without a word between host and device in passes of decodes.

Where the reference asks which experts were chosen, and how long contexts are, this one computes with every expert, and over block tables at full
width. That costs arithmetic, of which decodes need little, and memory, so only as many tokens as fit are read so.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from model_worker.batch import Batch
from model_worker.kernels.head_products import batched_per_head
from model_worker.kernels.interface import PagedAttention, SparseAttention, WindowedAttention
from model_worker.kernels.table_attention import TableAttention
from model_worker.kernels.torch_backend import TorchKernels
from model_worker.kv_pool import KVPool

EVERY_EXPERT_TOKENS = 512
"""Tokens of the largest pass that computes with every expert."""


class TorchDeviceKernels(TorchKernels):
    """See `Kernels`. Right on any device."""

    can_be_captured = True
    captured_tokens_max = 1 << 18
    """A layer's keys of so many tokens are copied twice: at 8 heads of 128 elements in bfloat16 that is 1 GiB, and as much for values."""

    def linear_per_head(self, x: Tensor, weight: Tensor) -> Tensor:
        return batched_per_head(x, weight)

    def paged_attention(self, batch: Batch, kv: KVPool) -> PagedAttention:
        return TableAttention(batch, kv) if self._fits(batch) else super().paged_attention(batch, kv)

    def windowed_attention(self, batch: Batch, kv: KVPool) -> WindowedAttention:
        return TableAttention(batch, kv) if self._fits(batch) else super().windowed_attention(batch, kv)

    def sparse_attention(self, batch: Batch, kv: KVPool) -> SparseAttention:
        return TableAttention(batch, kv) if self._fits(batch) else super().sparse_attention(batch, kv)

    def _fits(self, batch: Batch) -> bool:
        is_decode = batch.num_decodes == batch.num_rows
        return is_decode and batch.num_rows * batch.max_context_len <= self.captured_tokens_max

    def _weighted_sum(
        self, x: Tensor, ids: Tensor, weights: Tensor, num_experts: int, expert: Callable[[int, Tensor], Tensor]
    ) -> Tensor:
        if len(x) > EVERY_EXPERT_TOKENS:
            return super()._weighted_sum(x, ids, weights, num_experts, expert)
        output = torch.zeros_like(x)
        for index in range(num_experts):
            share = (weights * (ids == index)).sum(dim=1, keepdim=True)
            # Of an expert that nobody asked no infinity may get through (0 * inf).
            output += (expert(index, x) * share).masked_fill(share == 0, 0.0).to(x.dtype)
        return output
