"""Multi-head latent attention by AITER's Triton kernels: many query heads over one vector per position, whose first part is the value too.

The kernel reads a list of the slots of each query's context (AITER's newest versions have another, which reads block tables; its published wheel has
not). The lists of a pass are made on the device. Those of a long prefill would take more memory than what they list, so it goes in pieces,
whose lists are made for each layer anew.
"""

import torch
from torch import Tensor

from model_worker.batch import Batch
from model_worker.kernels.aiter.triton_attention import TritonAttention
from model_worker.kernels.aiter.triton_calls import TritonCalls
from model_worker.kv_pool import KVPool
from model_worker.placement import Placement
from tessera.values.config import ConfigError

LISTED_MAX = 1 << 26
"""Slots listed at once: 256 MiB."""

_LISTED_STEP = 1 << 22  # worked out at once: some 100 MiB of positions and places

PIECE_QUERIES_MAX = 512
"""Queries of a piece, whose heads have a float32 value each before it is their result: 128 heads of 512 elements take 128 MiB."""

_PROGRAMS = 1024
"""As many programs keep every compute unit busy: the context of few queries is split into parts."""

_PART_MIN = 64  # positions that are worth a program
_PARTS_MAX = 16
_HEADS = 16  # of a program


class TritonLatentAttention(TritonAttention):
    """Attention of one batch over a pool with one plane of 16 bits."""

    def __init__(self, calls: TritonCalls, batch: Batch, kv: KVPool, placement: Placement) -> None:
        if kv.dtype.itemsize == 1:
            raise ConfigError("kv_cache_dtype fp8: aiter's Triton kernels for latent attention read no 8-bit floats: use auto")
        super().__init__(calls, batch, kv, placement)
        self._lens = placement.take(batch.positions) + 1  # what each query sees
        tokens = torch.arange(batch.num_tokens, device=placement.device)
        self._row_of = torch.searchsorted(self._rows.cu_seqlens_q[1:].long(), tokens, right=True)
        self._piece_queries = max(1, min(PIECE_QUERIES_MAX, LISTED_MAX // batch.max_context_len))
        fits = batch.num_tokens <= self._piece_queries
        self._listed = self._list(0, batch.num_tokens) if fits else None

    def attend_latent(self, layer: int, query: Tensor, key: Tensor, rank: int) -> Tensor:
        vectors = self._pool.keys(layer).view(-1, 1, self._pool.head_dim)
        parts = []
        for first in range(0, len(query), self._piece_queries):
            piece = query[first : first + self._piece_queries].contiguous()
            context = self._list(first, first + len(piece)) if self._listed is None else self._listed
            scale, splits = query.shape[2] ** -0.5, self._num_splits(*piece.shape[:2])
            parts.append(self._calls.latent_attention(piece, vectors, rank, context, scale, splits))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _list(self, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Where the contexts of the queries `[first, stop)` begin, int32 `[n + 1]`, and their slots one after the other, int32."""
        lens = self._lens[first:stop]
        starts = torch.cat((lens.new_zeros(1), lens.cumsum(0)))
        room = len(lens) * self._rows.context_max
        listed = self._slots.new_zeros(room + 1, dtype=torch.int32)
        step = max(1, _LISTED_STEP // self._rows.context_max)
        for part in range(0, len(lens), step):
            slots, is_seen = self._context(slice(first + part, min(first + part + step, stop)))
            places = starts[part : part + len(slots)].unsqueeze(1) + torch.arange(slots.shape[1], device=slots.device)
            listed.scatter_(0, torch.where(is_seen, places, room).flatten(), slots.flatten())
        return starts.int(), listed

    def _context(self, queries: slice) -> tuple[Tensor, Tensor]:
        """Slots of the positions from 0 on, int32 `[n, context_max]`, and which of them each query sees."""
        block_size, tables = self._pool.block_size, self._rows.block_tables
        positions = torch.arange(self._rows.context_max, dtype=torch.int32, device=tables.device)
        columns = torch.div(positions, block_size, rounding_mode="floor").clamp(max=tables.shape[1] - 1)
        slots = tables[self._row_of[queries]].index_select(1, columns) * block_size + positions % block_size
        return slots, positions < self._lens[queries].unsqueeze(1)

    def _num_splits(self, queries: int, heads: int) -> int:
        """In how many parts each context is worked on at once, a power of two."""
        programs = queries * -(-heads // _HEADS)
        worth = min(_PARTS_MAX, _PROGRAMS // programs, self._rows.context_max // _PART_MIN)
        return 1 << max(0, worth.bit_length() - 1)
