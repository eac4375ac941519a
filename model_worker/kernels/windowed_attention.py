"""Paged attention with sinks and a sliding window, in torch: scores written out, since torch's kernel knows no sinks.

Rows with few queries go in groups of similar length, longer prefill chunks in tiles. Of a row only the blocks are read that its window
touches. Entries behind a row's end are zeroed: masking alone would let a NaN left by another request through (0 * NaN).
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model_worker.batch import Batch
from model_worker.kernels.interface import WindowedAttention
from model_worker.kernels.torch_attention import GROUPED_QUERIES_MAX, TorchPagedAttention, groups_of_few
from model_worker.kv_pool import KVPool

QUERY_TILE = 64
"""Queries of a chunk whose scores exist at once: [heads, QUERY_TILE, context] floats."""


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """g rows with n queries each, and C positions from the first block on that one of a row's queries sees.

    `tokens` int64 `[g * n]`; `blocks` int64 `[g * C / block_size]`; `stale` bool `[g, 1, C, 1]` where a position lies behind the row's
    last query; `hidden` bool `[g, 1, 1, n, C]` where a query does not see a position.
    """

    tokens: Tensor
    blocks: Tensor
    stale: Tensor
    hidden: Tensor


class TorchWindowedAttention(TorchPagedAttention, WindowedAttention):
    """Attention of one batch; keeps references to it and to the pool."""

    def __init__(self, batch: Batch, kv: KVPool) -> None:
        super().__init__(batch, kv)
        self._batch = batch
        self._pool = kv
        self._pieces: dict[int | None, list[_Piece]] = {}  # by window

    def attend_window(self, layer: int, query: Tensor, sinks: Tensor, window: int | None) -> Tensor:
        if window not in self._pieces:
            self._pieces[window] = _cut(self._batch, self._pool, window)
        output = torch.empty_like(query)
        for piece in self._pieces[window]:
            output.index_copy_(0, piece.tokens, self._attend_piece(layer, piece, query.index_select(0, piece.tokens), sinks))
        return output.flatten(1)

    def _attend_piece(self, layer: int, piece: _Piece, query: Tensor, sinks: Tensor) -> Tensor:
        rows, count = piece.hidden.shape[0], piece.hidden.shape[3]
        kv_heads, head_dim = self._pool.num_kv_heads, self._pool.head_dim
        query = query.view(rows, count, kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)  # [g, kv_heads, shared, n, head_dim]
        keys, values = (
            self._context(cache, piece).unsqueeze(2) for cache in (self._pool.keys(layer), self._pool.values(layer))
        )
        scores = (query @ keys.transpose(3, 4) / math.sqrt(head_dim)).masked_fill(piece.hidden, float("-inf"))
        sink = sinks.view(kv_heads, -1, 1, 1)
        largest = torch.maximum(scores.amax(dim=4, keepdim=True), sink)
        weights = (scores - largest).exp()
        output = weights @ values / (weights.sum(dim=4, keepdim=True) + (sink - largest).exp())
        return output.permute(0, 3, 1, 2, 4).reshape(rows * count, -1, head_dim)

    def _context(self, cache: Tensor, piece: _Piece) -> Tensor:
        """A layer's keys or values of the piece, `[g, num_kv_heads, C, head_dim]`."""
        blocks = cache.index_select(0, piece.blocks).view(piece.hidden.shape[0], -1, *cache.shape[1:])
        context: Tensor = blocks.transpose(1, 2).flatten(2, 3).masked_fill(piece.stale, 0.0)
        return context


def _cut(batch: Batch, kv: KVPool, window: int | None) -> list[_Piece]:
    """All tokens of the batch, each in one piece."""
    lens, starts = batch.context_lens.numpy(), batch.cu_seqlens_q.numpy().astype(np.int64)
    counts = np.diff(starts)
    reach = lens if window is None else np.minimum(lens, window + counts + kv.block_size)
    groups = list(groups_of_few(starts, reach))
    for row in np.flatnonzero(counts > GROUPED_QUERIES_MAX):
        for first in range(starts[row], starts[row + 1], QUERY_TILE):
            groups.append((np.array([row]), np.arange(first, min(first + QUERY_TILE, starts[row + 1]))[None]))
    return [_piece(batch, kv, rows, tokens, window) for rows, tokens in groups]


def _piece(batch: Batch, kv: KVPool, rows: np.ndarray, tokens: np.ndarray, window: int | None) -> _Piece:
    """`rows` int64 `[g]`, `tokens` int64 `[g, n]` of them in ascending order."""
    queries, tables = batch.positions.numpy()[tokens], batch.block_tables.numpy()
    seen_from = np.zeros_like(queries) if window is None else np.maximum(queries - window + 1, 0)
    first_block, stop_block = seen_from[:, 0] // kv.block_size, queries[:, -1] // kv.block_size + 1
    index = first_block[:, None] + np.arange(int((stop_block - first_block).max()))
    blocks = tables[rows[:, None], np.minimum(index, tables.shape[1] - 1)]
    blocks = np.where(index < stop_block[:, None], blocks, kv.null_block).astype(np.int64)
    positions = first_block[:, None] * kv.block_size + np.arange(index.shape[1] * kv.block_size)
    hidden = (positions[:, None] > queries[:, :, None]) | (positions[:, None] < seen_from[:, :, None])
    device = kv.store.device
    return _Piece(
        tokens=torch.from_numpy(tokens.ravel()).to(device),
        blocks=torch.from_numpy(blocks.ravel()).to(device),
        stale=torch.from_numpy(positions > queries[:, -1:])[:, None, :, None].to(device),
        hidden=torch.from_numpy(hidden)[:, None, None].to(device),
    )
