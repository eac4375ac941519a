"""How to cut a product into tiles of rows so that a row's bits depend on nothing but the row.

A library chooses how it multiplies by the number of rows: another kernel, another order of summation, other bits. Here a product is computed
only for numbers of rows that were seen to give each row the bits that it has among REFERENCE_ROWS on one thread, at whatever
place in the tile. A tile may be padded.
"""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera.values.config import ConfigError

_log = logging.getLogger(__name__)

REFERENCE_ROWS = 16

CANDIDATES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Numbers of rows that are tried. They are at most 1.5 times the last from 16 on, so that little of a tile is padding."""

TRIAL_MAX = 2**32
"""Multiplications of one trial, so that trials of a large weight take little beside its loading."""

CALL_ROWS = 16
"""What a call costs besides its rows, in rows: about as long it takes to read a weight that is not in the cache."""

PANEL_MAX = 640
"""Columns of x summed in one go. A library cuts longer sums where its threads and caches please (MKL: from 768 on)."""


class NotInvariant(ConfigError):
    """What this machine's torch computes for a row depends on the rows beside it, in a way that no tile avoids."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"batch_invariant: {what}. Where torch multiplies with MKL, MKL_CBWR=AUTO,STRICT in the environment may help"
        )


@dataclass(frozen=True, slots=True)
class RowTiles:
    """`sizes` are the numbers of rows to use, ascending; `one_thread`: at more threads none of them is good."""

    sizes: tuple[int, ...]
    one_thread: bool
    _next: tuple[int, ...]  # by number of rows left, up to the largest size: the size to use next

    def cover(self, rows: int) -> list[int]:
        """Sizes of the cheapest tiles for `rows` >= 1 rows; their sum is at least `rows`."""
        tiles = []
        while rows > 0:
            size = self._next[min(rows, self.sizes[-1])]
            tiles.append(size)
            rows -= size
        return tiles


def product(x: Tensor, weight: Tensor, result: Tensor) -> None:
    """Write `x @ weight.T` to `result` `[T, out]`; x `[T, in]`, weight `[out, in]`. Panel by panel, each at most PANEL_MAX columns of both."""
    panels = max(1, -(-x.shape[1] // PANEL_MAX))
    width = -(-x.shape[1] // (16 * panels)) * 16  # a multiple of 64 bytes
    (first_x, first_weight), *others = zip(torch.split(x, width, 1), torch.split(weight, width, 1), strict=True)
    torch.mm(first_x, first_weight.t(), out=result)
    for panel_x, panel_weight in others:
        result.addmm_(panel_x, panel_weight.t())


def find_row_tiles(weight: Tensor) -> RowTiles:
    """The tiles for `product` with weights that lie as `weight` `[out, in]` does, at the present number of threads. Tries random numbers:
    the order of a sum shows in the last bits of some of its thousands of results. Raises NotInvariant."""
    generator = torch.Generator().manual_seed(0)
    candidates = [size for size in CANDIDATES if size <= REFERENCE_ROWS or size * weight.numel() <= TRIAL_MAX]
    like = torch.empty_like(weight).normal_(generator=generator)
    x = torch.empty(candidates[-1] + REFERENCE_ROWS, weight.shape[1], dtype=weight.dtype).normal_(generator=generator)
    expected, result = x.new_empty(2, len(x), weight.shape[0])
    with one_thread():
        for tile, part in zip(torch.split(x, REFERENCE_ROWS), torch.split(expected, REFERENCE_ROWS), strict=True):
            product(tile, like, part)

    def fits(size: int) -> bool:
        # From row 1 on, so that every row has another place in its tile than it has in the reference's.
        rows = slice(1, 1 + size)
        product(x[rows], like, result[rows])
        return torch.equal(result[rows], expected[rows])

    name = "x".join(map(str, weight.shape))
    sizes = tuple(filter(fits, candidates))
    alone = not sizes and torch.get_num_threads() > 1
    if alone:
        with one_thread():
            sizes = tuple(filter(fits, candidates))
    if not sizes:
        raise NotInvariant(
            f"a product with a {name} weight gives a row other bits at another place among {REFERENCE_ROWS} rows"
        )
    _log.info("products with %s weights take %s rows%s", name, ", ".join(map(str, sizes)), " on one thread" if alone else "")
    return RowTiles(sizes, alone, _next_sizes(sizes))


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread inside."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _next_sizes(sizes: tuple[int, ...]) -> tuple[int, ...]:
    costs, chosen = [0], [0]
    for rows in range(1, sizes[-1] + 1):
        cost, size = min((CALL_ROWS + size + costs[max(0, rows - size)], size) for size in sizes)
        costs.append(cost)
        chosen.append(size)
    return tuple(chosen)
