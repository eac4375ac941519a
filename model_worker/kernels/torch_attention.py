"""Paged attention in torch: decodes in groups of similar length, prefill chunks row by row.

The KV of a decode group is gathered into one small buffer that stays in the CPU's cache and is used again by every group and
layer. Stale entries behind a row's end are zeroed in the buffer: masking alone would let a NaN left by another request through (0 * NaN).
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from model_worker.batch import Batch
from model_worker.kernels.interface import PagedAttention
from model_worker.kv_pool import KVPool

GROUP_TOKENS_MAX = 2048  # padded KV tokens of one decode group: at 3 heads x 64 floats its keys and values take 3 MB
QUERY_TILE = 256  # queries of a prefill chunk that share one mask [256, context] and see no keys behind their last


@dataclass(frozen=True, slots=True, eq=False)
class _DecodeGroup:
    """Decode rows whose KV is gathered together, padded to C tokens (whole blocks). H is num_kv_heads.

    `rows` int64 `[g]`; `blocks` int64 `[g * H * C / block_size]` indexes (block, head) pairs; `stale` int64 lists the entries of the
    gathered `[g * H * C]` that lie behind their row's end; `mask` `[g, 1, 1, C]` is 0 on the context and -inf behind it.
    """

    rows: Tensor
    blocks: Tensor
    stale: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _PrefillRow:
    """One row with tokens `[start, stop)` of the batch; `blocks` int64 covers its context, and is None when all of it is in this batch."""

    start: int
    stop: int
    context_len: int
    blocks: Tensor | None


class TorchPagedAttention(PagedAttention):
    """Attention of one batch; keeps references to the batch's pool, and buffers for the largest decode group."""

    def __init__(self, batch: Batch, kv: KVPool) -> None:
        self._kv = kv
        lens = batch.context_lens.numpy()
        tables = batch.block_tables.numpy()
        decodes = batch.num_decodes
        self._slots = _head_slots(batch.slot_mapping, kv)
        self._groups = [_decode_group(rows, lens[rows], tables, kv) for rows in group_by_length(lens[:decodes])]
        starts = batch.cu_seqlens_q.tolist()
        self._prefills = [
            _prefill_row(starts[row], starts[row + 1], int(lens[row]), tables[row], kv) for row in range(decodes, len(lens))
        ]
        largest = max((group.blocks.numel() for group in self._groups), default=0)
        self._key_buffer = torch.empty(largest, kv.block_size * kv.head_dim, dtype=kv.dtype)
        self._value_buffer = torch.empty_like(self._key_buffer)

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        head_dim = self._kv.head_dim
        self._kv.keys(layer).view(-1, head_dim).index_copy_(0, self._slots, key.reshape(-1, head_dim))
        self._kv.values(layer).view(-1, head_dim).index_copy_(0, self._slots, value.reshape(-1, head_dim))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.empty_like(query)
        for group in self._groups:
            output.index_copy_(0, group.rows, self._decode(layer, group, query.index_select(0, group.rows)))
        for row in self._prefills:
            tokens = slice(row.start, row.stop)
            if row.blocks is None:
                output[tokens] = _attend_causal(query[tokens], key[tokens], value[tokens])
            else:
                output[tokens] = self._attend_chunk(layer, row, row.blocks, query[tokens])
        return output.flatten(1)

    def _decode(self, layer: int, group: _DecodeGroup, query: Tensor) -> Tensor:
        """One query per row, `[g, num_heads, head_dim]`; the query heads of a KV head go through the kernel as if they were its queries."""
        rows, heads, head_dim = query.shape
        kv_heads = self._kv.num_kv_heads
        keys = self._gather(self._kv.keys(layer), group, self._key_buffer)
        values = self._gather(self._kv.values(layer), group, self._value_buffer)
        query = query.view(rows, kv_heads, heads // kv_heads, head_dim)
        return scaled_dot_product_attention(query, keys, values, attn_mask=group.mask).reshape(rows, heads, head_dim)

    def _gather(self, cache: Tensor, group: _DecodeGroup, buffer: Tensor) -> Tensor:
        """A layer's keys or values of a group, `[g, num_kv_heads, C, head_dim]`, in `buffer`."""
        part = buffer[: group.blocks.numel()]
        torch.index_select(cache.view(-1, part.shape[1]), 0, group.blocks, out=part)
        if group.stale.numel():
            part.view(-1, self._kv.head_dim).index_fill_(0, group.stale, 0.0)
        return part.view(group.rows.numel(), self._kv.num_kv_heads, -1, self._kv.head_dim)

    def _attend_chunk(self, layer: int, row: _PrefillRow, blocks: Tensor, query: Tensor) -> Tensor:
        """The queries of a chunk, `[n, num_heads, head_dim]`, over the row's context in the pool, tile by tile."""
        keys = _context(self._kv.keys(layer), blocks, row.context_len)
        values = _context(self._kv.values(layer), blocks, row.context_len)
        earlier = row.context_len - len(query)
        outputs = []
        for first in range(0, len(query), QUERY_TILE):
            tile = query[first : first + QUERY_TILE]
            end = earlier + first + len(tile)
            visible = torch.arange(end) <= torch.arange(earlier + first, end).unsqueeze(1)
            outputs.append(_attend(tile, keys[:, :end], values[:, :end], visible))
        return torch.cat(outputs)


def group_by_length(lens: np.ndarray) -> list[np.ndarray]:
    """Split decode rows (their `lens` int32 `[n]`) into groups: longest first, at most GROUP_TOKENS_MAX padded
    tokens (or one row), no row shorter than half its group's longest. Returns the row indices of each group."""
    order = np.argsort(-lens, kind="stable")
    groups = []
    first = 0
    while first < len(order):
        longest = int(lens[order[first]])
        stop = first + max(1, GROUP_TOKENS_MAX // longest)
        tail = lens[order[first:stop]]
        count = int(np.count_nonzero(2 * tail >= longest))
        groups.append(order[first : first + count])
        first += count
    return groups


def _head_slots(slot_mapping: Tensor, kv: KVPool) -> Tensor:
    """Where token t's head h lies among a layer's `[(num_blocks + 1) * H * block_size]` vectors, int64 `[T * H]`."""
    block = torch.div(slot_mapping, kv.block_size, rounding_mode="floor")
    first = block * (kv.num_kv_heads * kv.block_size) + slot_mapping % kv.block_size
    return (first.unsqueeze(1) + torch.arange(kv.num_kv_heads) * kv.block_size).flatten()


def _decode_group(rows: np.ndarray, lens: np.ndarray, tables: np.ndarray, kv: KVPool) -> _DecodeGroup:
    block_counts = -(-lens.astype(np.int64) // kv.block_size)
    width = int(block_counts.max())
    inside = np.arange(width) < block_counts[:, None]
    blocks = np.where(inside, tables[rows, :width], kv.null_block).astype(np.int64)
    heads = np.arange(kv.num_kv_heads)
    pairs = blocks[:, None, :] * kv.num_kv_heads + heads[None, :, None]
    positions = np.arange(width * kv.block_size)
    behind = positions >= lens[:, None]
    row, position = np.nonzero(behind & np.repeat(inside, kv.block_size, axis=1))
    stale = (row[:, None] * kv.num_kv_heads + heads) * len(positions) + position[:, None]
    mask = np.where(behind, np.float32("-inf"), np.float32(0.0))[:, None, None, :]
    return _DecodeGroup(
        rows=torch.from_numpy(rows),
        blocks=torch.from_numpy(pairs.ravel()),
        stale=torch.from_numpy(stale.ravel()),
        mask=torch.from_numpy(mask).to(kv.dtype),
    )


def _prefill_row(start: int, stop: int, context_len: int, table: np.ndarray, kv: KVPool) -> _PrefillRow:
    if context_len == stop - start:
        return _PrefillRow(start, stop, context_len, None)
    blocks = table[: -(-context_len // kv.block_size)].astype(np.int64)
    return _PrefillRow(start, stop, context_len, torch.from_numpy(blocks))


def _context(cache: Tensor, blocks: Tensor, context_len: int) -> Tensor:
    """A row's keys or values, `[num_kv_heads, context_len, head_dim]`."""
    return cache.index_select(0, blocks).transpose(0, 1).flatten(1, 2)[:, :context_len]


def _attend_causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A whole prompt over itself: query `[n, num_heads, head_dim]`, key and value `[n, num_kv_heads, head_dim]`."""
    output = scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        key.transpose(0, 1).unsqueeze(0),
        value.transpose(0, 1).unsqueeze(0),
        is_causal=True,
        enable_gqa=True,
    )
    return output.squeeze(0).transpose(0, 1)


def _attend(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """query `[n, num_heads, head_dim]` over keys and values `[num_kv_heads, context, head_dim]`; `visible` bool `[n, context]`."""
    output = scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), attn_mask=visible, enable_gqa=True
    )
    return output.squeeze(0).transpose(0, 1)
