"""What each block of the pool is: reference count and published content, as columns indexed by block id."""

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kv_manager.published_blocks import PublishedBlocks, Rows, entry_dtype


class Blocks:
    """Columns of `num_blocks` blocks of `block_size` tokens; row b is block b.

    - `ref_counts[b]`: tables that hold the block; 0 means it is in the free list. Written by the block manager.
    - `is_published[b]`: whether the block is in the prefix cache. Written, like all that follows, by the prefix index; the rest means
      something only while it holds.
    - `digests[b]`: link of the hash chain. `links[b]`: the link before it: the digest of the block before it, for the first block of a
      sequence that of its namespace, 0 for the empty one. `steps[b]`: twice the worker step whose output completed the block, plus 1
      where there is a block before it. `token_ids[b]` int32 `[block_size]`.

    Scalars are read and written in the arrays, which costs a third of what numpy takes for one; the views are the same memory, for many
    blocks at once. Columns of machine integers instead of an object per block: a pool of a million blocks takes 100 MB, and stays out of the
    garbage collector's way.
    """

    __slots__ = (
        "block_size",
        "digests",
        "digests_view",
        "is_published",
        "is_published_view",
        "links",
        "links_view",
        "num_blocks",
        "ref_counts",
        "ref_counts_view",
        "steps",
        "steps_view",
        "token_ids",
    )

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0 and block_size > 0, f"a pool needs blocks and tokens, got {num_blocks} x {block_size}"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.ref_counts = array("i", bytes(4 * num_blocks))
        self.is_published = bytearray(num_blocks)
        self.digests = array("Q", bytes(8 * num_blocks))
        self.links = array("Q", bytes(8 * num_blocks))
        self.steps = array("q", bytes(8 * num_blocks))
        self.token_ids: npt.NDArray[np.int32] = np.zeros((num_blocks, block_size), np.int32)
        self.ref_counts_view = np.frombuffer(self.ref_counts, np.int32)
        self.is_published_view = np.frombuffer(self.is_published, np.bool_)
        self.digests_view = np.frombuffer(self.digests, np.uint64)
        self.links_view = np.frombuffer(self.links, np.uint64)
        self.steps_view = np.frombuffer(self.steps, np.int64)

    def published_ids(self) -> npt.NDArray[np.int64]:
        """All published blocks, in order."""
        return np.flatnonzero(self.is_published_view)

    def published(self, block_ids: Sequence[int] | npt.NDArray[np.int64]) -> PublishedBlocks:
        """The prefix-cache entries of published blocks."""
        index = np.asarray(block_ids, np.int64)
        rows: Rows = np.empty(len(index), entry_dtype(self.block_size))
        rows["block_id"] = index
        rows["digest"] = self.digests_view[index]
        rows["parent"] = self.links_view[index]
        rows["step_and_parent"] = self.steps_view[index]
        rows["token_ids"] = self.token_ids[index]
        return PublishedBlocks(rows)
