"""Attention by AITER's compiled kernels over a pool in their layout: paged attention in assembly for single queries, FlashAttention for the chunks of
a prefill."""

import torch
from torch import Tensor

from model_worker.batch import Batch
from model_worker.kernels.aiter.library import AiterUnavailable
from model_worker.kernels.aiter.native_calls import NativeCalls, VarlenRows
from model_worker.kernels.aiter.native_rows import ChunkRows, chunk_rows, single_rows
from model_worker.kernels.aiter.probe import BLOCK_SIZE, HEAD_DIM
from model_worker.kernels.interface import RotatingAttention
from model_worker.kv_pool import KVPool
from model_worker.placement import Placement


class NativeAttention(RotatingAttention):
    """Attention of one batch; keeps a reference to the pool. `unit_scales`: ones, float32 `[num_blocks + 1, num_kv_heads, block_size]`, for a pool of
    8-bit floats, whose layers have one scale for all: queries and results take those. Raises AiterUnavailable."""

    def __init__(self, calls: NativeCalls, batch: Batch, kv: KVPool, placement: Placement, unit_scales: Tensor | None) -> None:
        if (kv.head_dim, kv.block_size) != (HEAD_DIM, BLOCK_SIZE):
            raise AiterUnavailable(
                f"AITER's compiled attention reads heads of {HEAD_DIM} elements in blocks of {BLOCK_SIZE}, not of {kv.head_dim} in {kv.block_size}:"
                " choose kernels aiter-triton"
            )
        self._calls = calls
        self._pool = kv
        self._unit_scales = unit_scales
        self._slots = placement.take(batch.slot_mapping)
        self._singles = single_rows(batch, kv, placement)
        self._chunks = chunk_rows(batch, kv.block_size, placement)
        self._tokens = torch.arange(batch.num_tokens, device=placement.device)

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        self._calls.reshape_and_cache(key, value, self._caches(layer), self._slots, self._pool.scales[layer])

    def rotate_and_store(self, layer: int, qk: Tensor, value: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """`qk` itself is rotated."""
        self._calls.rope_cached_positions_fwd_inplace(qk, *rotation, self._tokens)
        kv_heads = value.shape[1]
        query, key = qk.split_with_sizes((qk.shape[1] - kv_heads, kv_heads), dim=1)
        self.store(layer, key, value)
        return query, key

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self._singles is not None and self._singles.tokens is None:
            return self._attend_singles(layer, query.contiguous()).flatten(1)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if self._singles is not None and self._singles.tokens is not None:
            tokens = self._singles.tokens
            output.index_copy_(0, tokens, self._attend_singles(layer, query.index_select(0, tokens)))
        for chunk in self._chunks:
            context = (key, value) if chunk.are_new else None
            output.index_copy_(0, chunk.tokens, self._attend_chunk(layer, chunk, query, context))
        return output.flatten(1)

    def _attend_singles(self, layer: int, query: Tensor) -> Tensor:
        """`[N, num_heads, head_dim]`, contiguous: the kernel knows no other strides of its result."""
        rows = self._singles
        assert rows is not None
        caches, scales = self._caches(layer), self._pool.scales[layer]
        if self._unit_scales is None:
            return self._calls.pa_fwd_asm(query, caches, rows.tables, rows.context_lens, None)
        return self._calls.pa_fwd_asm(query * scales[0], caches, rows.tables, rows.context_lens, self._unit_scales) * scales[1]

    def _attend_chunk(self, layer: int, chunk: ChunkRows, query: Tensor, context: tuple[Tensor, Tensor] | None) -> Tensor:
        """`context`: keys and values of the batch, where these are all."""
        if context is None:
            keys, values = self._copied(layer, chunk, query.dtype)
        else:
            keys, values = (each.index_select(0, chunk.tokens) for each in context)
        rows = VarlenRows(chunk.starts, chunk.context_starts, chunk.queries_max, chunk.context_max)
        return self._calls.flash_attn_varlen_func(query.index_select(0, chunk.tokens), keys, values, rows, HEAD_DIM**-0.5)

    def _copied(self, layer: int, chunk: ChunkRows, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of a chunk's contexts, `[positions, num_kv_heads, head_dim]`."""
        block, offset = torch.div(chunk.slots, BLOCK_SIZE, rounding_mode="floor"), chunk.slots % BLOCK_SIZE
        keys, values = self._caches(layer)
        x = keys.shape[4]
        if self._unit_scales is None:
            return keys[block, :, :, offset].flatten(2), values[block, :, offset // x, :, offset % x]
        key_scale, value_scale = self._pool.scales[layer]
        keys, values = (cache.view(torch.uint8) for cache in (keys, values))  # indexing knows no 8-bit floats
        copied = keys[block, :, :, offset].flatten(2), values[block, :, offset // x, :, offset % x]
        found = (
            each.view(self._pool.dtype).to(dtype) * scale for each, scale in zip(copied, (key_scale, value_scale), strict=True)
        )
        return next(found), next(found)

    def _caches(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._pool.keys(layer), self._pool.values(layer)
