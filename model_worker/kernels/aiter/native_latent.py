"""Multi-head latent attention by AITER's compiled kernels: many query heads over one vector per position, whose first part is the value too."""

import torch
from torch import Tensor
from torch.nn import functional

from model_worker.batch import Batch
from model_worker.kernels.aiter.library import AiterUnavailable
from model_worker.kernels.aiter.native_calls import LatentRows, NativeCalls
from model_worker.kernels.aiter.native_rows import chunk_rows, context_slots, single_rows
from model_worker.kernels.aiter.probe import LATENT, LATENT_HEADS
from model_worker.kernels.interface import PagedAttention
from model_worker.kv_pool import KVPool
from model_worker.placement import Placement


class NativeLatentAttention(PagedAttention):
    """Attention of one batch over a pool with one plane of bfloat16; keeps a reference to the pool. Raises AiterUnavailable."""

    def __init__(self, calls: NativeCalls, batch: Batch, kv: KVPool, placement: Placement) -> None:
        if kv.head_dim != sum(LATENT) or kv.dtype != torch.bfloat16:
            raise AiterUnavailable(
                f"AITER's compiled latent attention reads {sum(LATENT)} elements of bfloat16, not {kv.head_dim} of {kv.dtype}:"
                " choose kernels aiter-triton"
            )
        self._calls = calls
        self._pool = kv
        self._slots = placement.take(batch.slot_mapping)
        self._unit = torch.ones(1, dtype=torch.float32, device=placement.device)
        singles = single_rows(batch, kv, placement)
        self._tokens = singles.tokens if singles is not None else None
        self._singles = None
        if singles is not None:
            starts, slots = context_slots(singles, kv.block_size)
            count = len(singles.context_lens)
            ones = torch.ones(count, dtype=torch.int32, device=placement.device)
            self._singles = LatentRows(
                torch.arange(count + 1, dtype=torch.int32, device=placement.device), starts, slots, ones, 1
            )
        self._chunks = [
            (
                chunk.tokens,
                LatentRows(
                    chunk.starts,
                    chunk.context_starts,
                    chunk.slots.int(),
                    torch.ones(len(chunk.starts) - 1, dtype=torch.int32, device=placement.device),
                    chunk.queries_max,
                ),
            )
            for chunk in chunk_rows(batch, kv.block_size, placement)
        ]

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        latent, rotated = key.squeeze(1).split_with_sizes(LATENT, dim=1)
        self._calls.concat_and_cache_mla(latent, rotated, self._pool.keys(layer).squeeze(2), self._slots, self._unit)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        raise AssertionError("of latents only a part is attended to, see attend_latent")

    def attend_latent(self, layer: int, query: Tensor, key: Tensor, rank: int) -> Tensor:
        assert rank == LATENT[0]
        tokens, heads, size = query.shape
        vectors = self._pool.keys(layer).view(-1, 1, 1, size)
        scale = size**-0.5
        taken = next(count for count in LATENT_HEADS if count >= heads)
        query = functional.pad(query, (0, 0, 0, taken - heads)).contiguous()
        if self._singles is not None and self._tokens is None:
            return self._calls.mla_decode_fwd(query, vectors, self._singles, scale)[:, :heads]
        output = query.new_empty(tokens, taken, rank)
        if self._singles is not None and self._tokens is not None:
            seen = self._calls.mla_decode_fwd(query.index_select(0, self._tokens), vectors, self._singles, scale)
            output.index_copy_(0, self._tokens, seen)
        for chunk, rows in self._chunks:
            output.index_copy_(0, chunk, self._calls.mla_prefill_fwd(query.index_select(0, chunk), vectors, rows, scale))
        return output[:, :heads]
