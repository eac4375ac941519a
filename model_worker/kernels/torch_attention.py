"""Paged attention in torch: rows with few queries (decodes, drafts) in groups of similar length, longer prefill chunks row by row."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from model_worker.batch import Batch
from model_worker.kernels.context_rows import ContextBuffer, ContextRows, context_rows
from model_worker.kernels.head_slots import HeadSlots
from model_worker.kernels.interface import PagedAttention
from model_worker.kv_pool import KVPool

GROUP_TOKENS_MAX = 2048  # padded KV tokens of one decode group: at 3 heads x 64 floats its keys and values take 3 MB
GROUPED_QUERIES_MAX = 8  # queries of a row that goes into a group
QUERY_TILE = 256  # queries of a prefill chunk that share one mask [256, context] and see no keys behind their last


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """g rows with n queries each: the tokens int64 `[g * n]`, row by row."""

    context: ContextRows
    tokens: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _PrefillRow:
    """One row with tokens `[start, stop)` of the batch; `blocks` int64 covers its context, and is None when all of it is in this batch."""

    start: int
    stop: int
    context_len: int
    blocks: Tensor | None


class TorchPagedAttention(PagedAttention):
    """Attention of one batch; keeps references to the batch's pool, and buffers for the largest group."""

    def __init__(self, batch: Batch, kv: KVPool) -> None:
        self._kv = kv
        lens = batch.context_lens.numpy()
        tables = batch.block_tables.numpy()
        starts = batch.cu_seqlens_q.numpy()
        counts = np.diff(starts)
        self._slots = HeadSlots(batch.slot_mapping, kv)
        self._groups = [
            _Group(
                context_rows(rows, lens[rows], tables, kv, num_queries=len(tokens[0])),
                torch.from_numpy(tokens.ravel()).to(kv.store.device),
            )
            for rows, tokens in groups_of_few(starts, lens)
        ]
        self._prefills = [
            _prefill_row(int(starts[row]), int(starts[row + 1]), int(lens[row]), tables[row], kv)
            for row in np.flatnonzero(counts > GROUPED_QUERIES_MAX)
        ]
        self._buffer = ContextBuffer(kv, [group.context for group in self._groups])

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        self._slots.store(layer, key, value)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.empty_like(query)
        for group in self._groups:
            output.index_copy_(0, group.tokens, self._attend_group(layer, group.context, query.index_select(0, group.tokens)))
        for row in self._prefills:
            tokens = slice(row.start, row.stop)
            if row.blocks is None:
                output[tokens] = _attend_causal(query[tokens], key[tokens], value[tokens])
            else:
                output[tokens] = self._attend_chunk(layer, row, row.blocks, query[tokens])
        return output.flatten(1)

    def _attend_group(self, layer: int, group: ContextRows, query: Tensor) -> Tensor:
        """`query` and the result are `[g * n, num_heads, head_dim]`; the query heads of a KV head go through the kernel as if they were its
        queries."""
        _, heads, head_dim = query.shape
        rows, _, count, _ = group.mask.shape
        kv_heads = self._kv.num_kv_heads
        keys, values = self._buffer.keys(layer, group), self._buffer.values(layer, group)
        query = query.view(rows, count, kv_heads, -1, head_dim).transpose(1, 2)
        mask = group.mask if count == 1 else group.mask.repeat_interleave(heads // kv_heads, dim=2)
        output = scaled_dot_product_attention(query.flatten(2, 3), keys, values, attn_mask=mask)
        return output.view_as(query).transpose(1, 2).reshape(-1, heads, head_dim)

    def _attend_chunk(self, layer: int, row: _PrefillRow, blocks: Tensor, query: Tensor) -> Tensor:
        """The queries of a chunk, `[n, num_heads, head_dim]`, over the row's context in the pool, tile by tile."""
        keys = _context(self._kv.keys(layer), blocks, row.context_len)
        values = _context(self._kv.values(layer), blocks, row.context_len)
        earlier = row.context_len - len(query)
        outputs = []
        for first in range(0, len(query), QUERY_TILE):
            tile = query[first : first + QUERY_TILE]
            end = earlier + first + len(tile)
            places = torch.arange(end, device=query.device)
            visible = places <= places[earlier + first :].unsqueeze(1)
            outputs.append(_attend(tile, keys[:, :end], values[:, :end], visible))
        return torch.cat(outputs)


def groups_of_few(starts: np.ndarray, lens: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The rows with at most GROUPED_QUERIES_MAX queries, in groups of as many each and of similar length: rows int64 `[g]`, and their
    tokens int64 `[g, n]`. `starts` int32 `[R + 1]`, `lens` int32 `[R]`."""
    counts = np.diff(starts)
    for count in np.unique(counts[counts <= GROUPED_QUERIES_MAX]).tolist():
        rows = np.flatnonzero(counts == count)
        for group in group_by_length(lens[rows]):
            yield rows[group], starts[rows[group], None] + np.arange(count)


def group_by_length(lens: np.ndarray) -> list[np.ndarray]:
    """Split rows (their `lens` int32 `[n]`) into groups: longest first, at most GROUP_TOKENS_MAX padded
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


def _prefill_row(start: int, stop: int, context_len: int, table: np.ndarray, kv: KVPool) -> _PrefillRow:
    if context_len == stop - start:
        return _PrefillRow(start, stop, context_len, None)
    blocks = table[: -(-context_len // kv.block_size)].astype(np.int64)
    return _PrefillRow(start, stop, context_len, torch.from_numpy(blocks).to(kv.store.device))


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
