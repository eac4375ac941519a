"""Attention of decodes over their block tables at full width, in torch: shapes depend on how many rows there are and how wide their tables, and
nothing on what these say. So a pass may be recorded, its batch lying on the device, and replayed with other contexts of the same tables.

All blocks of a table are read. Entries behind a row's end are zeroed: masking alone would let a NaN left by another request through (0 * NaN).
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from model_worker.batch import Batch
from model_worker.kernels.head_slots import HeadSlots
from model_worker.kernels.interface import IndexQueries, SparseAttention, WindowedAttention
from model_worker.kv_pool import KVPool


class TableAttention(WindowedAttention, SparseAttention):
    """Attention of R rows with one query each, over C positions: what `batch.max_context_len` needs in whole blocks. Keeps a reference to the
    pool, and to a batch that lies on the pool's device."""

    def __init__(self, batch: Batch, kv: KVPool) -> None:
        assert batch.num_decodes == batch.num_rows == batch.num_tokens
        device = kv.store.device
        self._kv = kv
        self._slots = HeadSlots(batch.slot_mapping, kv)
        tables = batch.block_tables[:, : -(-batch.max_context_len // kv.block_size)].to(device)
        self._last = batch.context_lens.to(device).unsqueeze(1) - 1
        self._places = torch.arange(tables.shape[1] * kv.block_size, device=device)
        self._behind = self._places > self._last  # [R, C]
        # What a table says behind its row's context is any number.
        self._tables = tables.masked_fill(self._behind[:, :: kv.block_size], kv.null_block)

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        self._slots.store(layer, key, value)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows, heads, head_dim = query.shape
        keys = self._context(self._kv.keys(layer))
        values = keys if self._kv.num_planes == 1 else self._context(self._kv.values(layer))
        shared = query.view(rows, self._kv.num_kv_heads, -1, head_dim)
        seen = scaled_dot_product_attention(shared, keys, values, attn_mask=~self._behind[:, None, None])
        return seen.reshape(rows, heads * head_dim)

    def attend_window(self, layer: int, query: Tensor, sinks: Tensor, window: int | None) -> Tensor:
        rows, heads, head_dim = query.shape
        keys, values = self._context(self._kv.keys(layer)), self._context(self._kv.values(layer))
        hidden = self._behind if window is None else self._behind | (self._places <= self._last - window)
        scores = query.view(rows, self._kv.num_kv_heads, -1, head_dim) @ keys.transpose(2, 3) / math.sqrt(head_dim)
        sink = sinks.view(1, self._kv.num_kv_heads, -1, 1)
        scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
        largest = torch.maximum(scores.amax(dim=3, keepdim=True), sink)
        weights = (scores - largest).exp()
        seen = weights @ values / (weights.sum(dim=3, keepdim=True) + (sink - largest).exp())
        return seen.reshape(rows, heads * head_dim)

    def attend_chosen(self, layer: int, query: Tensor, index: IndexQueries, rank: int) -> Tensor:
        size = query.shape[2]
        context, chosen = self._context(self._kv.keys(layer)).squeeze(1), self._behind
        keys, index_keys = context.split_with_sizes((size, index.query.shape[2]), dim=2)
        if len(self._places) > index.num_chosen:
            by_head = (index.query @ index_keys.transpose(1, 2)).relu_()
            scores = (index.weights.unsqueeze(1) @ by_head).squeeze(1).masked_fill(self._behind, float("-inf"))
            best = scores.sort(dim=1, descending=True, stable=True).indices[:, : index.num_chosen]
            keys = keys.gather(1, best.unsqueeze(2).expand(-1, -1, size))
            # As many of the best places are positions that the query sees as there are such positions.
            chosen = self._places[: index.num_chosen] > self._last
        keys = keys.unsqueeze(1)
        seen = scaled_dot_product_attention(query.unsqueeze(2), keys, keys, attn_mask=~chosen[:, None, None])
        return seen.squeeze(2)[..., :rank]

    def _context(self, cache: Tensor) -> Tensor:
        """A layer's keys or values, `[R, num_kv_heads, C, head_dim]`."""
        kv = self._kv
        by_head = cache.view(-1, kv.num_kv_heads, kv.block_size, kv.head_dim)  # one head lies alike in every layout
        blocks = by_head.index_select(0, self._tables.flatten()).view(*self._tables.shape, *by_head.shape[1:])
        return blocks.transpose(1, 2).flatten(2, 3).masked_fill(self._behind[:, None, :, None], 0.0)
