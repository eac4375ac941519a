"""Latent attention over the positions that an index chooses: the choice in torch, in float32, the attention by AITER's Triton kernel.

Decodes choose together, at the width of the longest context; a longer chunk chooses row by row. Nobody asks the device for anything, so a step of
decodes alone can be recorded.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from model_worker.batch import Batch
from model_worker.kernels.aiter.triton_attention import TritonAttention
from model_worker.kernels.aiter.triton_calls import TritonCalls
from model_worker.kernels.interface import IndexQueries, SparseAttention
from model_worker.kv_pool import KVPool
from model_worker.placement import Placement
from tessera.values.config import ConfigError

SCORES_MAX = 1 << 27
"""Scores of index heads that exist at once, where more than one query has them: 512 MiB."""

NOWHERE = -1
"""For a place that a query has no further position for."""

_HEADS = 16  # of a program; AITER starts none for fewer


@dataclass(frozen=True, slots=True)
class _Group:
    """Tokens `[first, stop)`: of one row, or, with `is_decode`, of as many rows with one query each. `context`: of the longest."""

    first: int
    stop: int
    row: int
    context: int
    is_decode: bool

    def tiles(self, num_heads: int) -> Iterator["_Group"]:
        """The group cut so that a tile has at most SCORES_MAX scores, or one token."""
        count = max(1, SCORES_MAX // (self.context * num_heads))
        for first in range(self.first, self.stop, count):
            row = self.row + (first - self.first if self.is_decode else 0)
            yield _Group(first, min(first + count, self.stop), row, self.context, self.is_decode)


class TritonSparseAttention(TritonAttention, SparseAttention):
    """Attention of one batch over a pool with one plane of 16 bits."""

    def __init__(self, calls: TritonCalls, batch: Batch, kv: KVPool, placement: Placement) -> None:
        if kv.dtype.itemsize == 1:
            raise ConfigError("kv_cache_dtype fp8: aiter's Triton kernels for latent attention read no 8-bit floats: use auto")
        super().__init__(calls, batch, kv, placement)
        self._lens = placement.take(batch.positions) + 1  # what each query sees
        self._groups = _groups(batch)

    def attend_chosen(self, layer: int, query: Tensor, index: IndexQueries, rank: int) -> Tensor:
        heads, size = query.shape[1:]
        latents = self._pool.keys(layer)
        chosen = self._choose(latents.view(-1, self._pool.head_dim)[:, size:], index)
        # AITER leaves out the heads behind the last whole program.
        query = pad(query, (0, 0, 0, -heads % _HEADS))
        found = self._calls.chosen_latent_attention(query, latents[..., :size], rank, chosen, self._rows, size**-0.5)
        return found[:, :heads]

    def _choose(self, keys: Tensor, index: IndexQueries) -> Tensor:
        """The slots that each query attends to, int32 `[T, num_chosen]`, or as many as the longest context has, among `keys` `[slots, dim]`."""
        width = min(index.num_chosen, self._rows.context_max)
        parts = []
        for group in self._groups:
            for tile in group.tiles(index.query.shape[1]):
                slots, is_seen = self._context(tile)
                if tile.context > width:
                    found = keys.index_select(0, slots.flatten()).view(*slots.shape, -1)
                    places = _best(self._scores(tile, found, index, is_seen), width)
                    slots, is_seen = slots.expand(len(places), -1).gather(1, places), is_seen.gather(1, places)
                parts.append(pad(torch.where(is_seen, slots, NOWHERE), (0, width - slots.shape[1]), value=NOWHERE))
        return torch.cat(parts)

    def _context(self, tile: _Group) -> tuple[Tensor, Tensor]:
        """Slots int32 `[g, context]` of the tile's rows, the null block's behind a row's end; and which of them each query sees, bool `[n, context]`."""
        rows = slice(tile.row, tile.row + (tile.stop - tile.first if tile.is_decode else 1))
        block_size, tables = self._pool.block_size, self._rows.block_tables[rows]
        positions = torch.arange(tile.context, dtype=torch.int32, device=tables.device)
        columns = torch.div(positions, block_size, rounding_mode="floor")
        slots = tables.index_select(1, columns) * block_size + positions % block_size
        is_inside = positions < self._rows.context_lens[rows].unsqueeze(1)
        null_slot = self._pool.null_block * block_size
        return torch.where(is_inside, slots, null_slot), positions < self._lens[tile.first : tile.stop].unsqueeze(1)

    def _scores(self, tile: _Group, keys: Tensor, index: IndexQueries, is_seen: Tensor) -> Tensor:
        """Of the positions of the context, float32 `[n, context]`; -inf where a query does not see one. `keys` `[g, context, dim]`."""
        query, weights = (tensor[tile.first : tile.stop].float() for tensor in (index.query, index.weights))
        by_head = (query.view(len(keys), -1, query.shape[2]) @ keys.float().transpose(1, 2)).relu_()
        by_head = by_head.view(*query.shape[:2], -1)
        return (weights.unsqueeze(1) @ by_head).squeeze(1).masked_fill(~is_seen, float("-inf"))


def _best(scores: Tensor, count: int) -> Tensor:
    """Places of the `count` largest of `scores` float32 `[n, width]`, int64 `[n, count]`; of equal ones the first. A GPU finds them sooner than it
    sorts, but in no order among equals: so they are found among whole numbers, a score above and a place below, no two of which are equal."""
    bits = (scores + 0.0).view(torch.int32)  # there is one zero
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    places = torch.arange(scores.shape[1] - 1, -1, -1, device=scores.device)
    return ((ordered << 32) | places).topk(count, dim=1).indices


def _groups(batch: Batch) -> list[_Group]:
    decodes = batch.num_decodes
    groups = [_Group(0, decodes, 0, batch.max_context_len, is_decode=True)] if decodes else []
    if decodes < batch.num_rows:  # then the batch lies on the host
        starts, lens = batch.cu_seqlens_q.tolist(), batch.context_lens.tolist()
        for row in range(decodes, batch.num_rows):
            groups.append(_Group(starts[row], starts[row + 1], row, lens[row], is_decode=False))
    return groups
