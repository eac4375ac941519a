"""The KV of some rows of a batch, copied out of the pool's blocks into one padded piece of memory.

That piece is small, stays in the CPU's cache, and is used again by every group of rows and every layer. Stale entries behind a row's end
are zeroed in it: masking alone would let a NaN left by another request through (0 * NaN).
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model_worker.kv_pool import KVPool


@dataclass(frozen=True, slots=True, eq=False)
class ContextRows:
    """Rows whose KV is copied together, padded to C tokens, in B whole blocks. H is num_kv_heads.

    `rows` int64 `[g]`; `blocks` int64 `[g * H * B]` indexes (block, head) pairs; `stale` int64 lists the entries of the copied
    `[g * H * B * block_size]` that lie behind their row's end; `mask` `[g, 1, Q, C]` is 0 on what each of a row's last Q positions sees,
    and -inf behind it.
    """

    rows: Tensor
    blocks: Tensor
    stale: Tensor
    mask: Tensor


def context_rows(
    rows: np.ndarray, lens: np.ndarray, tables: np.ndarray, kv: KVPool, padded: int = 0, num_queries: int = 1
) -> ContextRows:
    """`rows` int64 `[g]` of `tables` int32 `[R, max_blocks]`, with contexts of `lens` int32 `[g]`. C is `padded`, where that is given at
    least the longest of them, or else the whole blocks that hold it. Q is `num_queries`, at most the shortest of them."""
    block_counts = -(-lens.astype(np.int64) // kv.block_size)
    width = -(-padded // kv.block_size) if padded else int(block_counts.max())
    inside = np.arange(width) < block_counts[:, None]
    columns = np.minimum(np.arange(width), tables.shape[1] - 1)
    blocks = np.where(inside, tables[rows][:, columns], kv.null_block).astype(np.int64)
    heads = np.arange(kv.num_kv_heads)
    pairs = blocks[:, None, :] * kv.num_kv_heads + heads[None, :, None]
    positions = np.arange(width * kv.block_size)
    behind = positions >= lens[:, None]
    row, position = np.nonzero(behind & np.repeat(inside, kv.block_size, axis=1))
    stale = (row[:, None] * kv.num_kv_heads + heads) * len(positions) + position[:, None]
    seen = lens[:, None] - np.arange(num_queries - 1, -1, -1)
    mask = np.where(positions >= seen[:, :, None], np.float32("-inf"), np.float32(0.0))[:, None]
    device = kv.store.device
    return ContextRows(
        rows=torch.from_numpy(rows).to(device),
        blocks=torch.from_numpy(pairs.ravel()).to(device),
        stale=torch.from_numpy(stale.ravel()).to(device),
        mask=torch.from_numpy(mask[..., : padded or len(positions)]).to(device, kv.dtype),
    )


class ContextBuffer:
    """Memory for the largest of some `ContextRows`. What `keys` and `values` return is valid until they are called again."""

    def __init__(self, kv: KVPool, groups: Iterable[ContextRows]) -> None:
        self._kv = kv
        largest = max((group.blocks.numel() for group in groups), default=0)
        self._keys = torch.empty(largest, kv.block_size * kv.head_dim, dtype=kv.dtype, device=kv.store.device)
        self._values = torch.empty_like(self._keys)

    def keys(self, layer: int, group: ContextRows) -> Tensor:
        """A layer's keys of a group, `[g, num_kv_heads, C, head_dim]`."""
        return self._copy(self._kv.keys(layer), group, self._keys)

    def values(self, layer: int, group: ContextRows) -> Tensor:
        """A layer's values of a group, `[g, num_kv_heads, C, head_dim]`."""
        return self._copy(self._kv.values(layer), group, self._values)

    def _copy(self, cache: Tensor, group: ContextRows, buffer: Tensor) -> Tensor:
        part = buffer[: group.blocks.numel()]
        torch.index_select(cache.view(-1, part.shape[1]), 0, group.blocks, out=part)
        if group.stale.numel():
            part.view(-1, self._kv.head_dim).index_fill_(0, group.stale, 0.0)
        return part.view(group.rows.numel(), self._kv.num_kv_heads, -1, self._kv.head_dim)[:, :, : group.mask.shape[-1]]
