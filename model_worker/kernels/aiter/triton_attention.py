"""Attention by AITER's Triton kernels over pools laid out by token. What a step needs is taken to the device once, and no layer asks the device for
anything, so that a graph can be made of a step."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from model_worker.batch import Batch
from model_worker.kernels.aiter.triton_calls import KVCache, PagedRows, TritonCalls
from model_worker.kernels.interface import RotatingAttention, WindowedAttention
from model_worker.kernels.torch_rotation import rotate_heads
from model_worker.kv_pool import KVPool
from model_worker.placement import Placement
from tessera.values.config import ConfigError

BLOCK_SIZE_MIN = 16
"""Tokens that the matrix units take at once."""

_LOOKED_UP = 64  # positions


class BlockSizeUnfit(ConfigError):
    """Triton's kernels do not read blocks of this size."""


class TritonAttention(RotatingAttention, WindowedAttention):
    """Attention of one batch; keeps a reference to the pool. Raises BlockSizeUnfit."""

    def __init__(self, calls: TritonCalls, batch: Batch, kv: KVPool, placement: Placement) -> None:
        if kv.block_size < BLOCK_SIZE_MIN or not _is_power_of_two(kv.block_size):
            raise BlockSizeUnfit(f"block_size is {kv.block_size}: aiter's Triton kernels need a power of two, 16 or more")
        self._calls = calls
        self._pool = kv
        self._slots = placement.take(batch.slot_mapping)
        self._rows = PagedRows(
            cu_seqlens_q=placement.take(batch.cu_seqlens_q),
            context_lens=placement.take(batch.context_lens),
            # AITER looks up the blocks of 64 positions at once, those behind a context too.
            block_tables=pad(placement.take(batch.block_tables), (0, _LOOKED_UP // kv.block_size)),
            queries_max=batch.max_query_len,
            context_max=batch.max_context_len,
        )

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        cache = self._cache(layer)
        self._write(cache.keys, key, cache.key_scale)
        if self._pool.num_planes == 2:
            self._write(cache.values, value, cache.value_scale)

    def rotate_and_store(self, layer: int, qk: Tensor, value: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        kv_heads, head_dim = value.shape[1:]
        sizes = (qk.shape[1] - kv_heads, kv_heads)
        if 2 * rotation[0].shape[1] == head_dim and _is_power_of_two(head_dim):
            query, key = qk.split_with_sizes(sizes, dim=1)
            return self._calls.rotate_and_cache((query, key, value), self._cache(layer), self._slots, rotation)
        query, key = rotate_heads(qk, *rotation).split_with_sizes(sizes, dim=1)
        self.store(layer, key, value)
        return query, key

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self._attend(layer, query, None, None)

    def attend_window(self, layer: int, query: Tensor, sinks: Tensor, window: int | None) -> Tensor:
        return self._attend(layer, query, window, sinks)

    def _attend(self, layer: int, query: Tensor, window: int | None, sinks: Tensor | None) -> Tensor:
        scale = query.shape[2] ** -0.5
        return self._calls.attention(query, self._cache(layer), self._rows, scale, window, sinks).flatten(1)

    def _cache(self, layer: int) -> KVCache:
        scales = self._pool.scales[layer]
        return KVCache(self._pool.keys(layer), self._pool.values(layer), scales[:1], scales[1:])

    def _write(self, plane: Tensor, heads: Tensor, scale: Tensor) -> None:
        """Vectors `[T, num_kv_heads, head_dim]` to a plane `[blocks, block_size, num_kv_heads, head_dim]`."""
        vectors = plane.view(-1, *heads.shape[1:])
        if plane.dtype.itemsize == 1:
            largest = torch.finfo(plane.dtype).max
            heads = (heads.float() / scale).clamp(-largest, largest).to(plane.dtype)
            vectors, heads = vectors.view(torch.uint8), heads.view(torch.uint8)  # index_copy_ knows no 8-bit floats
        vectors.index_copy_(0, self._slots, heads)


def _is_power_of_two(size: int) -> bool:
    return size & (size - 1) == 0
