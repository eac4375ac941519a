"""Blocks that nobody holds, in the order in which they are handed out."""

from array import array
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import islice

import numpy as np
import numpy.typing as npt


class FreeList:
    """First blocks without cached content, lowest id first; then cached ones, least recently released first.

    Ids from `_untouched` on are free and without content, and need no bookkeeping. Returned blocks without content are a heap,
    cached ones a doubly linked list through two columns, so that a prefix hit leaves the middle of it in O(1).
    """

    __slots__ = ("_next", "_num_blocks", "_num_cached", "_plain", "_previous", "_untouched")

    def __init__(self, num_blocks: int) -> None:
        """All of blocks 0 to `num_blocks - 1`, without content."""
        self._num_blocks = num_blocks
        self._untouched = 0
        self._plain: list[int] = []
        self._num_cached = 0
        # Row `num_blocks` is the list's head and tail. Links of blocks outside the list are stale.
        self._next = array("i", [num_blocks]) * (num_blocks + 1)
        self._previous = array("i", [num_blocks]) * (num_blocks + 1)

    def __len__(self) -> int:
        return len(self._plain) + self._num_blocks - self._untouched + self._num_cached

    def __iter__(self) -> Iterator[int]:
        """Block ids in the order in which `take` would hand them out."""
        yield from sorted(self._plain)
        yield from range(self._untouched, self._num_blocks)
        yield from self._cached()

    def ids(self, count_max: int) -> npt.NDArray[np.int64]:
        """As iterating gives them, at most `count_max` of the cached ones."""
        cached = np.fromiter(islice(self._cached(), count_max), np.int64)
        return np.concatenate((np.sort(np.array(self._plain, np.int64)), np.arange(self._untouched, self._num_blocks), cached))

    def take(self, count: int) -> list[int]:
        """Hand out the next `count` blocks; there must be that many."""
        assert count <= len(self), f"{count} blocks asked of {len(self)} free"
        block_ids: list[int] = []
        while len(block_ids) < count and self._plain:
            block_ids.append(heappop(self._plain))
        stop = min(self._untouched + count - len(block_ids), self._num_blocks)
        block_ids.extend(range(self._untouched, stop))
        self._untouched = stop
        if len(block_ids) < count:
            evicted = list(islice(self._cached(), count - len(block_ids)))
            self.take_cached(evicted)
            block_ids += evicted
        return block_ids

    def take_cached(self, block_ids: Sequence[int]) -> None:
        """Hand out these cached blocks, wherever they stand."""
        following, previous = self._next, self._previous
        for block_id in block_ids:
            before, after = previous[block_id], following[block_id]
            following[before] = after
            previous[after] = before
        self._num_cached -= len(block_ids)

    def release_plain(self, block_id: int) -> None:
        """Take back a block without cached content."""
        heappush(self._plain, block_id)

    def release_cached(self, block_ids: Sequence[int]) -> None:
        """Take back cached blocks; the first of them will be handed out before the others."""
        following, previous, end = self._next, self._previous, self._num_blocks
        for block_id in block_ids:
            last = previous[end]
            following[last] = previous[end] = block_id
            previous[block_id], following[block_id] = last, end
        self._num_cached += len(block_ids)

    def strip_cached(self) -> list[int]:
        """The cached blocks have no content any more. Returns them, in the order in which they would have been handed out."""
        block_ids = list(self._cached())
        self.take_cached(block_ids)
        for block_id in block_ids:
            self.release_plain(block_id)
        return block_ids

    def refill(self, plain: list[int], cached: list[int]) -> None:
        """Replace the content: free blocks without cached content in any order, cached ones in the order of handing out."""
        end = self._untouched = self._num_blocks
        self._plain = sorted(plain)  # a heap
        while self._plain and self._plain[-1] == self._untouched - 1:
            self._untouched = self._plain.pop()
        self._num_cached = 0
        self._next[end] = self._previous[end] = end
        self.release_cached(cached)

    def _cached(self) -> Iterator[int]:
        following, end = self._next, self._num_blocks
        block_id = following[end]
        while block_id != end:
            yield block_id
            block_id = following[block_id]
