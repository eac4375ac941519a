"""How a batch is cut for AITER's compiled attention: queries that go by themselves through paged attention, and chunks of a prefill that go
through FlashAttention over their whole context, which is copied out of the pool.

Rows with few queries (decodes, drafts) have each query as a row of its own: its context ends at itself, and its key is in the pool by then. That
costs no copy of their contexts, of which there may be many.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from model_worker.batch import Batch
from model_worker.kv_pool import KVPool
from model_worker.placement import Placement

FEW_QUERIES = 8
"""Queries of a row that go by themselves."""

LOOKED_UP = 16
"""Blocks behind a context whose ids AITER may read, though not the blocks' positions: it reads contexts in pieces of up to 256 positions."""

COPIED_MAX = 1 << 17
"""Positions whose keys and values are copied at once, unless a row alone has more: 512 MiB at 8 heads of 128 elements in 16 bits."""


@dataclass(frozen=True, slots=True, eq=False)
class SingleRows:
    """N queries, each a row of its own. `tokens` int64 `[N]`: which of the batch; None: all, in order. `tables` int32 `[N, blocks]`, contiguous, the
    null block behind a context; `context_lens` int32 `[N]`; `positions_max`: at least the sum of these, a host number."""

    tokens: Tensor | None
    tables: Tensor
    context_lens: Tensor
    positions_max: int


@dataclass(frozen=True, slots=True, eq=False)
class ChunkRows:
    """Rows with many queries. `tokens` int64 `[n]`: theirs, row by row. `starts`, `context_starts` int32 `[R + 1]` cut these and the contexts.
    `slots` int64: where each position of the contexts lies among the pool's, block * block_size + offset. `are_new`: `tokens` are all there is
    of their contexts."""

    tokens: Tensor
    starts: Tensor
    context_starts: Tensor
    queries_max: int
    context_max: int
    slots: Tensor
    are_new: bool


def single_rows(batch: Batch, kv: KVPool, placement: Placement) -> SingleRows | None:
    """None: there are none. A batch on the device has nothing else, and no number of it is read."""
    if batch.num_decodes == batch.num_rows:
        on_host = batch.context_lens.device.type == "cpu"
        total = int(batch.context_lens.sum()) if on_host else batch.num_rows * batch.max_context_len
        context_lens = placement.take(batch.context_lens)
        return SingleRows(None, _tables(placement.take(batch.block_tables), context_lens, kv), context_lens, total)
    starts, counts, lens = _counted(batch)
    rows = np.flatnonzero(counts <= FEW_QUERIES)
    if not len(rows):
        return None
    row_of = np.repeat(rows, counts[rows])
    behind = np.concatenate([np.arange(count - 1, -1, -1) for count in counts[rows]])  # queries of its row after each
    tokens = starts[row_of] + counts[row_of] - 1 - behind
    seen = lens[row_of] - behind
    context_lens = placement.take(torch.from_numpy(seen.astype(np.int32)))
    return SingleRows(
        tokens=placement.take(torch.from_numpy(tokens)),
        tables=_tables(placement.take(batch.block_tables[torch.from_numpy(row_of)]), context_lens, kv),
        context_lens=context_lens,
        positions_max=int(seen.sum()),
    )


def chunk_rows(batch: Batch, block_size: int, placement: Placement) -> list[ChunkRows]:
    """The rows with more than FEW_QUERIES, in groups of at most COPIED_MAX positions."""
    if batch.num_decodes == batch.num_rows:
        return []
    _, counts, lens = _counted(batch)
    rows = np.flatnonzero(counts > FEW_QUERIES)
    return [_chunk(batch, group, block_size, placement) for group in _groups(rows, lens)]


def context_slots(rows: SingleRows, block_size: int) -> tuple[Tensor, Tensor]:
    """Where each row's context begins, int32 `[N + 1]`, and the slots of all contexts one after the other, int32 `[positions_max]`, the rest
    anything. Made on the device."""
    ends = rows.context_lens.cumsum(0, dtype=torch.int32)
    at = torch.arange(rows.positions_max, dtype=torch.int32, device=ends.device)
    row = torch.searchsorted(ends, at, right=True, out_int32=True).clamp_(max=len(ends) - 1)
    position = at.sub_((ends - rows.context_lens)[row])
    block = torch.div(position, block_size, rounding_mode="floor").clamp_(max=rows.tables.shape[1] - 1)
    slots = rows.tables[row, block].mul_(block_size).add_(position.remainder_(block_size))
    return torch.cat((ends.new_zeros(1), ends)), slots


def _tables(tables: Tensor, context_lens: Tensor, kv: KVPool) -> Tensor:
    """With LOOKED_UP more columns, and the null block wherever a table has anything behind its context."""
    tables = functional.pad(tables, (0, LOOKED_UP))
    starts = torch.arange(tables.shape[1], dtype=torch.int32, device=tables.device) * kv.block_size
    return torch.where(starts < context_lens.unsqueeze(1), tables, kv.null_block)


def _counted(batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each row its first token, its number of queries, and the length of its context; int64 `[R]`."""
    starts = batch.cu_seqlens_q.numpy().astype(np.int64)
    return starts[:-1], np.diff(starts), batch.context_lens.numpy().astype(np.int64)


def _groups(rows: np.ndarray, lens: np.ndarray) -> Iterator[np.ndarray]:
    first = 0
    while first < len(rows):
        fits = int(np.searchsorted(np.cumsum(lens[rows[first:]]), COPIED_MAX, side="right"))
        yield rows[first : first + max(1, fits)]
        first += max(1, fits)


def _chunk(batch: Batch, rows: np.ndarray, block_size: int, placement: Placement) -> ChunkRows:
    starts, counts, lens = (each[rows] for each in _counted(batch))
    position = _ranges(np.zeros_like(lens), lens)
    blocks = batch.block_tables.numpy()[np.repeat(rows, lens), position // block_size]

    def cut(sizes: np.ndarray) -> Tensor:
        return placement.take(torch.from_numpy(np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)))

    return ChunkRows(
        tokens=placement.take(torch.from_numpy(_ranges(starts, counts))),
        starts=cut(counts),
        context_starts=cut(lens),
        queries_max=int(counts.max()),
        context_max=int(lens.max()),
        slots=placement.take(torch.from_numpy(blocks.astype(np.int64) * block_size + position % block_size)),
        are_new=bool((counts == lens).all()),
    )


def _ranges(firsts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The numbers from each of `firsts` on, as many as `counts` says, one after the other; int64."""
    ranges: np.ndarray = np.arange(counts.sum()) + np.repeat(firsts - (np.cumsum(counts) - counts), counts)
    return ranges
