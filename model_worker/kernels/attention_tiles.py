"""How to cut attention into tiles so that a query's bits depend on nothing but the query and its context.

torch's kernel for CPUs walks over the context in pieces of PIECE keys from position 0 on, and keeps a running maximum and sum. A key
that is masked adds an exact zero, so a context may be padded; but the length of its last piece may change the order in which the
piece is summed, and how many queries share a pass may do so too (see `row_tiles`). Both are tried out here.
"""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from model_worker.kernels.row_tiles import NotInvariant, one_thread

_log = logging.getLogger(__name__)

QUERIES = 32
"""Queries of a tile of a prefill chunk, and the reference for smaller tiles. The kernel cuts up to 191 queries into such pieces itself."""

PIECE = 512

_STEP = 64
_KV_HEADS = 2  # of the trials


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """`queries`: numbers of queries to use, ascending, QUERIES the last; `pieces`: lengths of a last piece, ascending, PIECE the last."""

    queries: tuple[int, ...]
    pieces: tuple[int, ...]

    def hold(self, queries: int) -> int:
        """The smallest number of queries to use for at most QUERIES of them."""
        return next(size for size in self.queries if size >= queries)

    def pad(self, length: int) -> int:
        """The smallest length to use for a context of `length`, 1 or more."""
        whole = (length - 1) // PIECE * PIECE
        return whole + next(piece for piece in self.pieces if piece >= length - whole)


def find_attention_tiles(head_dim: int) -> AttentionTiles:
    """The tiles for this head_dim, at the present number of threads; float32. Tries random numbers, as `find_row_tiles` does. Raises
    NotInvariant."""
    generator = torch.Generator().manual_seed(0)
    query = 2 * torch.randn(1, _KV_HEADS, QUERIES + 1, head_dim, generator=generator)
    keys, values = torch.randn(2, 1, _KV_HEADS, 2 * PIECE, head_dim, generator=generator)

    def fits(size: int, length: int) -> bool:
        """Whether `size` queries over `length` keys get what they get among QUERIES, the length padded to whole pieces."""
        # From query 1 on, so that every query has another place than it has in the reference; in a batch with another tile.
        tile = torch.cat((query[:, :, :size], query[:, :, 1 : 1 + size]))
        result = _attend(tile, keys.expand(2, -1, -1, -1), values.expand(2, -1, -1, -1), length, length)
        shared = min(size, QUERIES - 1)
        return torch.equal(result[1:, :, :shared], expected[length][:, :, 1 : 1 + shared])

    lengths = range(_STEP, 2 * PIECE + 1, _STEP)
    with one_thread():
        tile = query[:, :, :QUERIES]
        expected = {length: _attend(tile, keys, values, length, -(-length // PIECE) * PIECE) for length in lengths}
    pieces = tuple(n for n in range(_STEP, PIECE + 1, _STEP) if fits(QUERIES, n) and fits(QUERIES, PIECE + n))
    queries = tuple(size for size in range(1, QUERIES + 1) if all(fits(size, n) and fits(size, PIECE + n) for n in pieces))
    if QUERIES not in queries or PIECE not in pieces:
        raise NotInvariant(
            f"attention with {head_dim} floats per head gives a query other bits beside other queries or padding"
        )
    _log.info("attention takes %s queries, pieces of %s keys", ", ".join(map(str, queries)), ", ".join(map(str, pieces)))
    return AttentionTiles(queries, pieces)


def _attend(query: Tensor, keys: Tensor, values: Tensor, length: int, padded: int) -> Tensor:
    """`query` `[B, H, n, head_dim]` over the first `length` of keys and values `[B, H, N, head_dim]`, zeros behind them up to `padded`."""
    behind = torch.arange(padded) >= length
    mask = torch.zeros(padded).masked_fill(behind, float("-inf")).expand(query.shape[0], 1, query.shape[2], padded)
    keys, values = (tensor[:, :, :padded].masked_fill(behind.unsqueeze(1), 0.0) for tensor in (keys, values))
    return scaled_dot_product_attention(query, keys, values, attn_mask=mask)
