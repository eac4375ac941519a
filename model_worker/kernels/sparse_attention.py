"""Attention over the positions that an index chooses, in torch.

A row's index keys are read once; its queries go on in tiles, each with the vectors of the positions that it has chosen, gathered from
the pool. Places that a query has no position for read the null block: masking alone would let a NaN left by another request through
(0 * NaN).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from model_worker.batch import Batch
from model_worker.kernels.interface import IndexQueries, SparseAttention
from model_worker.kernels.torch_attention import GROUP_TOKENS_MAX, GROUPED_QUERIES_MAX, TorchPagedAttention, groups_of_few
from model_worker.kv_pool import KVPool

SCORES_MAX = 1 << 24
"""Scores of index heads that exist at once, where more than one query has them: 64 MiB."""


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """g rows with n queries each, over contexts of up to C positions.

    `tokens` int64 `[g, n]`; `last` int64 `[g, n, 1]`: a query's own position, the last that it sees; `slots` int64 `[g, C]`: where each
    position lies among a layer's vectors, behind a row's end somewhere in the null block.
    """

    tokens: Tensor
    last: Tensor
    slots: Tensor

    def tiles(self, num_chosen: int, num_heads: int) -> Iterator["_Piece"]:
        """The piece cut into as many queries as may be worked on at once."""
        rows, width = self.slots.shape
        count = GROUP_TOKENS_MAX // (rows * min(width, num_chosen))
        if width > num_chosen:
            count = min(count, SCORES_MAX // (rows * width * num_heads))
        parts = (torch.split(tensor, max(1, count), dim=1) for tensor in (self.tokens, self.last))
        for tokens, last in zip(*parts, strict=True):
            yield _Piece(tokens, last, self.slots)


class TorchSparseAttention(TorchPagedAttention, SparseAttention):
    """Attention of one batch; keeps a reference to the pool."""

    def __init__(self, batch: Batch, kv: KVPool) -> None:
        super().__init__(batch, kv)
        self._pool = kv
        self._null_slot = kv.null_block * kv.block_size
        starts = batch.cu_seqlens_q.numpy()
        groups = list(groups_of_few(starts, batch.context_lens.numpy()))
        for row in np.flatnonzero(np.diff(starts) > GROUPED_QUERIES_MAX):
            groups.append((np.array([row]), np.arange(starts[row], starts[row + 1], dtype=np.int64)[None]))
        self._pieces = [_piece(batch, kv, rows, tokens) for rows, tokens in groups]

    def attend_chosen(self, layer: int, query: Tensor, index: IndexQueries, rank: int) -> Tensor:
        vectors = self._pool.keys(layer).view(-1, self._pool.head_dim)
        keys, index_keys = vectors.split_with_sizes((query.shape[2], index.query.shape[2]), dim=1)
        output = torch.empty_like(query)
        for piece in self._pieces:
            is_scored = piece.slots.shape[1] > index.num_chosen
            scored_keys = index_keys.index_select(0, piece.slots.flatten()).view(*piece.slots.shape, -1) if is_scored else None
            for tile in piece.tiles(index.num_chosen, index.query.shape[1]):
                slots, hidden = self._chosen(tile, index, scored_keys)
                tokens, context = tile.tokens.flatten(), keys.index_select(0, slots.flatten()).view(*slots.shape, -1)
                queries = query.index_select(0, tokens).unsqueeze(1)
                seen = scaled_dot_product_attention(queries, context, context, attn_mask=~hidden.unsqueeze(1))
                output.index_copy_(0, tokens, seen.squeeze(1))
        return output[..., :rank]

    def _chosen(self, tile: _Piece, index: IndexQueries, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        """Where the positions lie that a tile's queries attend to, int64 `[g * n, 1, k]`, and bool of that shape, true where a query has
        no further position. `keys` are the rows' index keys `[g, C, dim]`, None: everything is chosen."""
        (rows, count), width = tile.tokens.shape, tile.slots.shape[1]
        places = (
            torch.arange(width, device=tile.last.device).expand(rows, count, -1) if keys is None else _best(tile, index, keys)
        )
        # As many of the best places are positions that the query sees as there are such positions.
        hidden = torch.arange(places.shape[2], device=places.device) > tile.last
        slots = tile.slots.unsqueeze(1).expand(-1, count, -1).gather(2, places).masked_fill(hidden, self._null_slot)
        return slots.flatten(0, 1).unsqueeze(1), hidden.flatten(0, 1).unsqueeze(1)


def _best(tile: _Piece, index: IndexQueries, keys: Tensor) -> Tensor:
    """Places in the context by falling score, int64 `[g, n, num_chosen]`; those that a query does not see come last."""
    (rows, count), heads = tile.tokens.shape, index.query.shape[1]
    tokens = tile.tokens.flatten()
    query = index.query.index_select(0, tokens).view(rows, count * heads, -1)
    by_head = (query @ keys.transpose(1, 2)).relu_().view(rows, count, heads, -1)
    weights = index.weights.index_select(0, tokens).view(rows, count, 1, heads)
    scores = (weights @ by_head).squeeze(2)
    scores.masked_fill_(torch.arange(scores.shape[2], device=scores.device) > tile.last, float("-inf"))
    return scores.sort(dim=2, descending=True, stable=True).indices[..., : index.num_chosen]


def _piece(batch: Batch, kv: KVPool, rows: np.ndarray, tokens: np.ndarray) -> _Piece:
    """`rows` int64 `[g]`, `tokens` int64 `[g, n]` of them in ascending order."""
    last, tables = batch.positions.numpy()[tokens], batch.block_tables.numpy()
    positions = np.arange(int(last.max()) + 1)
    blocks = tables[rows][:, positions // kv.block_size].astype(np.int64)
    blocks = np.where(positions <= last[:, -1:], blocks, kv.null_block)
    slots = blocks * kv.block_size + positions % kv.block_size
    device = kv.store.device
    return _Piece(
        torch.from_numpy(tokens).to(device), torch.from_numpy(last).unsqueeze(2).to(device), torch.from_numpy(slots).to(device)
    )
