"""Paged attention by the compiled kernels: the cache is read where it lies."""

import torch
from torch import Tensor

from model_worker.batch import Batch
from model_worker.kernels.cpu.library import BatchView, CacheView, CpuLibrary, address, view_of
from model_worker.kernels.interface import RotatingAttention
from model_worker.kv_pool import KVPool


class CpuAttention(RotatingAttention):
    """Of one batch, which `batch` is a view of. Keeps references to it and to the pool, which has to lie as `KEYS_TRANSPOSED` has it."""

    def __init__(self, library: CpuLibrary, batch: Batch, kv: KVPool) -> None:
        self.pool = kv
        self._tensors = (batch.slot_mapping, batch.cu_seqlens_q, batch.context_lens, batch.block_tables.contiguous())
        addresses = map(address, self._tensors)
        tables = self._tensors[3]
        self.batch = view_of(BatchView(*addresses, batch.num_rows, batch.num_tokens, tables.stride(0)))
        self._rotate_and_store = library.of("rotate_and_store", kv.dtype)
        self._attend = library.of("attend", kv.dtype)
        self._caches: dict[int, object] = {}

    def rotate_and_store(self, layer: int, qk: Tensor, value: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        tokens, heads = qk.shape[0], qk.shape[1] - self.pool.num_kv_heads
        query, (cos, sin) = torch.empty(tokens, heads, self.pool.head_dim), rotation
        angles = address(cos), address(sin), cos.shape[1]
        self._rotate_and_store(self._cache(layer), self.batch, *_rows(qk), *_rows(value), *angles, heads, address(query))
        return query, qk[:, heads:]  # `attend` reads the cache, so nobody needs them rotated

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        self._rotate_and_store(self._cache(layer), self.batch, *_rows(key), *_rows(value), None, None, 0, 0, None)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        tokens, heads, head_dim = query.shape
        query, output = query.contiguous(), torch.empty(tokens, heads * head_dim)
        self._attend(self._cache(layer), self.batch, address(query), heads, head_dim**-0.5, address(output))
        return output

    def _cache(self, layer: int) -> object:
        if layer not in self._caches:
            kv = self.pool
            addresses = address(kv.keys(layer)), address(kv.values(layer))
            self._caches[layer] = view_of(CacheView(*addresses, kv.num_kv_heads, kv.block_size, kv.head_dim))
        return self._caches[layer]


def _rows(heads: Tensor) -> tuple[int | None, int]:
    """Address and stride of tokens `[T, heads, head_dim]`, of each of which the elements lie in one piece."""
    assert heads.stride(2) == 1 and (heads.shape[1] == 1 or heads.stride(1) == heads.shape[2])
    return address(heads), heads.stride(0)
