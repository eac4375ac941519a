"""torch on a CPU, bit for bit the same for a token whatever shares its batch and however its context was computed.

Products and attention go in tiles that were tried out (`row_tiles`, `attention_tiles`). The rest is row by row or element by element in
torch too, with one exception, `silu`: of a vector's leftover elements it takes another exp than of whole vectors.
"""

import os

import torch
from torch import Tensor

from model_worker.batch import Batch
from model_worker.group import ALONE, Group
from model_worker.kernels.attention_tiles import AttentionTiles, find_attention_tiles
from model_worker.kernels.interface import PagedAttention, SparseAttention, WindowedAttention
from model_worker.kernels.invariant_attention import InvariantPagedAttention
from model_worker.kernels.row_tiles import RowTiles, find_row_tiles, one_thread, product
from model_worker.kernels.torch_backend import TorchKernels
from model_worker.kv_pool import KVPool
from tessera.values.config import ConfigError


def ask_mkl_for_invariance() -> None:
    """Make MKL's products the same for any number of rows, and wherever a weight lies in memory, unless the environment says otherwise. For the
    whole process, and only before its first product: MKL reads MKL_CBWR once."""
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


class InvariantKernels(TorchKernels):
    """Finds the tiles of a weight's shape, and of a head's, when it first meets them: then any operation may raise NotInvariant, a
    ConfigError."""

    def __init__(self, group: Group = ALONE, peers: Group = ALONE) -> None:
        super().__init__(group, peers)
        self._row_tiles: dict[tuple[int, ...], RowTiles] = {}
        self._attention_tiles: dict[tuple[int, int], AttentionTiles] = {}

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        key = (*weight.shape, *weight.stride(), torch.get_num_threads())
        tiles = self._row_tiles.get(key)
        if tiles is None:
            tiles = self._row_tiles[key] = find_row_tiles(weight)
        if tiles.one_thread:
            with one_thread():
                result = _tiled(x, weight, tiles.cover(len(x)))
        else:
            result = _tiled(x, weight, tiles.cover(len(x)))
        return result if bias is None else result.add_(bias)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return torch.div(gate, gate.neg().exp_().add_(1.0)).mul_(up)

    def paged_attention(self, batch: Batch, kv: KVPool) -> PagedAttention:
        return InvariantPagedAttention(batch, kv, self._find_attention_tiles)

    def windowed_attention(self, batch: Batch, kv: KVPool) -> WindowedAttention:
        raise ConfigError("batch_invariant: there are no such kernels for attention with sinks and sliding windows (gpt-oss)")

    def sparse_attention(self, batch: Batch, kv: KVPool) -> SparseAttention:
        raise ConfigError("batch_invariant: there are no such kernels for attention over chosen positions (DeepSeek-V3.2)")

    def _find_attention_tiles(self, head_dim: int) -> AttentionTiles:
        key = (head_dim, torch.get_num_threads())
        if key not in self._attention_tiles:
            self._attention_tiles[key] = find_attention_tiles(head_dim)
        return self._attention_tiles[key]


def _tiled(x: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
    result = x.new_empty(sum(sizes), weight.shape[0])
    first = 0
    for size in sizes:
        tile = x[first : first + size]
        if len(tile) < size:
            tile = torch.cat((tile, x.new_zeros(size - len(tile), x.shape[1])))
        product(tile, weight, result[first : first + size])
        first += size
    return result[: len(x)]
