"""Paged attention whose bits for a query depend on that query and its context alone: not on the batch, the chunk, or the padding."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from model_worker.batch import Batch
from model_worker.kernels.attention_tiles import QUERIES, AttentionTiles
from model_worker.kernels.context_rows import ContextBuffer, ContextRows, context_rows
from model_worker.kernels.head_slots import HeadSlots
from model_worker.kernels.interface import PagedAttention
from model_worker.kernels.torch_attention import group_by_length
from model_worker.kv_pool import KVPool

CALL_TILES = 16
"""Tiles of a chunk that go through the kernel together: they share a mask and see no keys behind the last of them."""


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """Tiles `[first, stop)` of a chunk over its first C positions; `mask` `[stop - first, 1, QUERIES, C]`, 0 where a query sees, else -inf."""

    first: int
    stop: int
    mask: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """One row with the tokens `[start, stop)` of the batch, its context, and its calls."""

    start: int
    stop: int
    context: ContextRows
    calls: list[_Call]


class _Plan:
    """One batch cut into tiles, for `shared` query heads to a KV head: the queries of a KV head's query heads go through the kernel as
    if they were its own, token by token."""

    def __init__(self, batch: Batch, kv: KVPool, tiles: AttentionTiles, shared: int) -> None:
        lens, tables = batch.context_lens.numpy(), batch.block_tables.numpy()
        num_decodes = batch.num_decodes if shared <= QUERIES else 0
        self.decode_queries = tiles.hold(shared) if num_decodes else 0
        padded = np.array([tiles.pad(length) for length in lens[:num_decodes].tolist()], dtype=np.int64)
        self.decodes = [context_rows(rows, lens[rows], tables, kv, int(padded[rows].max())) for rows in group_by_length(padded)]
        starts = batch.cu_seqlens_q.tolist()
        self.chunks = []
        for row in range(num_decodes, len(lens)):
            start, stop = starts[row], starts[row + 1]
            context = context_rows(np.array([row]), lens[row : row + 1], tables, kv, tiles.pad(int(lens[row])))
            self.chunks.append(_Chunk(start, stop, context, _calls(stop - start, int(lens[row]), shared, tiles)))
        self.buffer = ContextBuffer(kv, [*self.decodes, *(chunk.context for chunk in self.chunks)])


class InvariantPagedAttention(PagedAttention):
    """Attention of one batch; keeps references to it and to the pool. `find_tiles` gives the tiles for a head_dim."""

    def __init__(self, batch: Batch, kv: KVPool, find_tiles: Callable[[int], AttentionTiles]) -> None:
        self._batch = batch
        self._kv = kv
        self._find_tiles = find_tiles
        self._slots = HeadSlots(batch.slot_mapping, kv)
        self._plans: dict[int, _Plan] = {}  # by query heads to a KV head

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        self._slots.store(layer, key, value)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        shared = query.shape[1] // self._kv.num_kv_heads
        plan = self._plans.get(shared)
        if plan is None:
            plan = self._plans[shared] = _Plan(self._batch, self._kv, self._find_tiles(self._kv.head_dim), shared)
        output = torch.empty_like(query)
        for group in plan.decodes:
            output.index_copy_(0, group.rows, self._decode(layer, group, plan, query.index_select(0, group.rows)))
        for chunk in plan.chunks:
            output[chunk.start : chunk.stop] = self._attend_chunk(layer, chunk, plan, query[chunk.start : chunk.stop])
        return output.flatten(1)

    def _decode(self, layer: int, group: ContextRows, plan: _Plan, query: Tensor) -> Tensor:
        """One query per row, `[g, num_heads, head_dim]`."""
        rows, heads, head_dim = query.shape
        shared = heads // self._kv.num_kv_heads
        tile = query.new_zeros(rows, self._kv.num_kv_heads, plan.decode_queries, head_dim)
        tile[:, :, :shared] = query.view(rows, -1, shared, head_dim)
        keys, values = plan.buffer.keys(layer, group), plan.buffer.values(layer, group)
        output = scaled_dot_product_attention(tile, keys, values, attn_mask=group.mask)
        return output[:, :, :shared].reshape(rows, heads, head_dim)

    def _attend_chunk(self, layer: int, chunk: _Chunk, plan: _Plan, query: Tensor) -> Tensor:
        """The queries of a chunk, `[n, num_heads, head_dim]`, over the row's context in the pool."""
        count, heads, head_dim = query.shape
        kv_heads = self._kv.num_kv_heads
        num_queries = count * (heads // kv_heads)
        tiles = query.new_zeros(kv_heads, chunk.calls[-1].stop * QUERIES, head_dim)
        tiles[:, :num_queries] = query.view(count, kv_heads, -1, head_dim).transpose(0, 1).flatten(1, 2)
        tiles = tiles.view(kv_heads, -1, QUERIES, head_dim).transpose(0, 1)
        keys, values = plan.buffer.keys(layer, chunk.context), plan.buffer.values(layer, chunk.context)
        outputs = []
        for call in chunk.calls:
            tile, visible = tiles[call.first : call.stop], call.mask.shape[-1]
            seen_keys, seen_values = (kv[:, :, :visible].expand(len(tile), -1, -1, -1) for kv in (keys, values))
            outputs.append(scaled_dot_product_attention(tile, seen_keys, seen_values, attn_mask=call.mask))
        output = torch.cat(outputs).transpose(0, 1).flatten(1, 2)[:, :num_queries]
        return output.view(kv_heads, count, -1, head_dim).transpose(0, 1).flatten(1, 2)


def _calls(count: int, context_len: int, shared: int, attention: AttentionTiles) -> list[_Call]:
    """The calls for the last `count` positions of a context, each with `shared` queries."""
    num_tiles = -(-count * shared // QUERIES)
    calls = []
    for first in range(0, num_tiles, CALL_TILES):
        stop = min(first + CALL_TILES, num_tiles)
        # What pads the last tile sees what the last query does.
        tokens = (torch.arange(first * QUERIES, stop * QUERIES) // shared).clamp(max=count - 1)
        positions = context_len - count + tokens
        padded = attention.pad(int(positions[-1]) + 1)
        hidden = torch.arange(padded) > positions.unsqueeze(1)
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
        calls.append(_Call(first, stop, mask.view(stop - first, 1, QUERIES, padded)))
    return calls
