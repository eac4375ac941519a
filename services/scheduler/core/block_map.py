"""The prefix-cache entries of one boot of a worker, as the journal tells them, and the pages in which the store keeps them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kv_manager.published_blocks import PublishedBlocks, Rows, entry_dtype, packed

PAGE_BLOCKS = 64
"""Blocks to a page. A store keeps a page as one value: fewer would cost it more bytes a block, more would be rewritten for little."""

_CAPACITY_MIN = 1024


@dataclass(frozen=True, slots=True)
class BlockPage:
    """The entries of blocks `[index * PAGE_BLOCKS, (index + 1) * PAGE_BLOCKS)` of one boot of a worker, as of record `as_of`."""

    as_of: int
    worker: str
    boot_id: bytes
    index: int
    entries: PublishedBlocks


class BlockMap:
    """Entries by block id. Equals any mapping from block id to the same entries."""

    __slots__ = ("_dtype", "_is_there", "_rows")

    def __init__(self) -> None:
        self._dtype = entry_dtype(0)
        self._rows: Rows = packed(np.empty(0, self._dtype))
        self._is_there: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)

    def apply(self, published: PublishedBlocks, unpublished: Sequence[int] | npt.NDArray[np.integer]) -> None:
        """Take entries out, then put others in."""
        self.apply_all([(published, unpublished)])

    def apply_all(self, changes: Sequence[tuple[PublishedBlocks, Sequence[int] | npt.NDArray[np.integer]]]) -> list[int]:
        """`apply` several of (published, unpublished), in this order. Many cost little more than one. Returns the pages that they touch."""
        published = PublishedBlocks.concatenate(blocks for blocks, _ in changes)
        gone = np.array([block_id for _, unpublished in changes for block_id in unpublished], np.int64)
        block_ids = np.concatenate((gone, published.block_ids))
        if not len(block_ids):
            return []
        self._fit(int(block_ids.max()) + 1, published)
        # numpy assigns in order: of several values for one block the last stays.
        self._rows[published.block_ids] = packed(published.rows)
        times = np.arange(len(changes))
        lens = ([len(unpublished) for _, unpublished in changes], [len(blocks) for blocks, _ in changes])
        order = np.argsort(np.concatenate((np.repeat(2 * times, lens[0]), np.repeat(2 * times + 1, lens[1]))), kind="stable")
        self._is_there[block_ids[order]] = order >= len(gone)
        pages: list[int] = np.unique(block_ids // PAGE_BLOCKS).tolist()
        return pages

    def values(self) -> PublishedBlocks:
        """All entries, by block id."""
        return PublishedBlocks(self._rows[self._is_there].view(self._dtype))

    def page(self, index: int) -> PublishedBlocks:
        """The entries of one page."""
        blocks = slice(index * PAGE_BLOCKS, (index + 1) * PAGE_BLOCKS)
        return PublishedBlocks(self._rows[blocks][self._is_there[blocks]].view(self._dtype))

    def page_indices(self) -> Iterator[int]:
        """The pages with any entry, in order."""
        yield from np.unique(np.flatnonzero(self._is_there) // PAGE_BLOCKS).tolist()

    def __iter__(self) -> Iterator[int]:
        """Block ids, in order."""
        return iter(np.flatnonzero(self._is_there).tolist())

    def __len__(self) -> int:
        return int(np.count_nonzero(self._is_there))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, BlockMap):
            return self.values() == other.values()
        if not isinstance(other, Mapping):
            return NotImplemented
        return {entry.block_id: entry for entry in self.values()} == other

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        return f"BlockMap of {list(self.values())!r}"

    def _fit(self, count: int, published: PublishedBlocks) -> None:
        """Make room for blocks below `count`, of the size of those that come."""
        if len(published) and published.rows.dtype.itemsize != self._dtype.itemsize:
            assert not self._is_there.any(), "one worker has one block size"
            self._dtype = published.rows.dtype
            self._rows = packed(np.empty(len(self._is_there), self._dtype))
        held = len(self._rows)
        if count <= held:
            return
        capacity = max(_CAPACITY_MIN, 1 << (count - 1).bit_length())
        rows, is_there = packed(np.empty(capacity, self._dtype)), np.zeros(capacity, np.bool_)
        rows[:held], is_there[:held] = self._rows, self._is_there
        self._rows, self._is_there = rows, is_there
