"""What AITER's kernels are to compute, in plain float32 torch, slowly and obviously; and contexts laid out in blocks for them to read."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from model_worker.kernels.aiter.triton_calls import KVCache, PagedRows, Scaled

BFLOAT16_STEP = 2.0**-8
"""Rounding to bfloat16 changes a number by this part of it at most."""


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    """bfloat16, normally distributed."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def error(found: Tensor, expected: Tensor) -> float:
    """The largest difference of two elements."""
    assert found.shape == expected.shape
    return float((found.float() - expected.float()).abs().max())


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)


def rotation(positions: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """cos and sin in bfloat16 `[T, size / 2]`."""
    angles = positions[:, None] * 10000.0 ** -(torch.arange(0, size, 2) / size)
    return angles.cos().bfloat16(), angles.sin().bfloat16()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The first `2 * cos.shape[1]` elements of each head rotated (NeoX)."""
    turned, kept = x.float().split([2 * cos.shape[1], x.shape[-1] - 2 * cos.shape[1]], -1)
    first, second = turned.chunk(2, -1)
    c, s = cos.float()[:, None], sin.float()[:, None]
    return torch.cat((first * c - second * s, second * c + first * s, kept), -1)


def dequantized(scaled: Scaled) -> Tensor:
    """Of a scale per row, or per group of a row's elements."""
    values = scaled.values.float()
    groups = values.view(len(values), scaled.scales.numel() // len(values), -1)
    return (groups * scaled.scales.view(len(values), -1, 1)).view(values.shape)


def attention(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    """One row: `[n, H, D]` queries at the end of the context `[c, KH, D]`."""
    groups = query.shape[1] // keys.shape[1]
    keys, values = (part.float().repeat_interleave(groups, 1) for part in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.float() * scale, keys)
    behind = torch.arange(len(keys) - len(query), len(keys))[:, None] - torch.arange(len(keys))[None, :]
    is_seen = (behind >= 0) & (behind < (len(keys) if window is None else window))
    scores = scores.masked_fill(~is_seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, len(query), 1)), -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(keys)], values)


@dataclass(frozen=True, slots=True, eq=False)
class PagedContext:
    """Rows' contexts by row, each `[context_len, ...]`, and their places in blocks that lie in disorder."""

    contexts: list[Tensor]
    tables: Tensor
    block_size: int

    @classmethod
    def of(cls, lengths: Sequence[int], heads: int, size: int, block_size: int = 16, *, seed: int) -> "PagedContext":
        contexts = [normal(length, heads, size, seed=seed + row) for row, length in enumerate(lengths)]
        counts = [-(-length // block_size) for length in lengths]
        order = torch.randperm(sum(counts) + 1, generator=torch.Generator().manual_seed(seed)).tolist()
        tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
        for row, count in enumerate(counts):
            tables[row, :count] = ints(*(order.pop() for _ in range(count)))
        return cls(contexts, tables, block_size)

    def slots(self, row: int, length: int) -> Tensor:
        """Where a row's first positions lie, int64."""
        positions = torch.arange(length)
        return self.tables[row, positions // self.block_size].long() * self.block_size + positions % self.block_size

    def laid_out(self, vectors: Sequence[Tensor]) -> Tensor:
        """`[blocks, block_size, ...]` with a vector for each position of each row; elsewhere numbers that would show in a result."""
        # Finite: the kernel for single queries multiplies what lies behind a context in its last block by 0, so a NaN there would reach the
        # result. KV pools begin with zeros.
        blocks = int(self.tables.max()) + 1
        flat = torch.full((blocks * self.block_size, *vectors[0].shape[1:]), 50.0, dtype=vectors[0].dtype)
        for row, own in enumerate(vectors):
            flat[self.slots(row, len(own))] = own
        return flat.view(blocks, self.block_size, *flat.shape[1:])

    def rows(self, queries: Sequence[int]) -> PagedRows:
        """For so many queries at the end of each context."""
        lengths = [len(context) for context in self.contexts]
        starts = torch.tensor([0, *queries]).cumsum(0).int()
        return PagedRows(starts, ints(*lengths), self.tables, max(queries), max(lengths))


def cache_of(keys: PagedContext, values: Sequence[Tensor]) -> KVCache:
    """In bfloat16."""
    return KVCache(keys.laid_out(keys.contexts), keys.laid_out(values), torch.ones(1), torch.ones(1))
