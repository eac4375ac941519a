"""What each block of the pool is: reference count and published content, as columns indexed by block id."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kv_manager.published_blocks import PublishedBlocks, Rows, entry_dtype


class Blocks:
    """Columns of `num_blocks` blocks of `block_size` tokens; row b is block b.

    - `ref_counts[b]`: tables that hold the block; 0 means it is in the free list. Written by the block manager.
    - `digests[b]`: link of the hash chain, None while unpublished. `parents[b]`: the digest of the block before it, for the first
      block of a sequence the root of its namespace (negative, or None). `token_ids[b]` int32 `[block_size]`. `published_steps[b]`:
      worker step whose output completed the block. Written by the prefix index; the last three mean something only while the
      block is published.

    Columns instead of an object per block keep a pool of a million blocks out of the garbage collector's way.
    """

    __slots__ = ("block_size", "digests", "num_blocks", "parents", "published_steps", "ref_counts", "token_ids")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0 and block_size > 0, f"a pool needs blocks and tokens, got {num_blocks} x {block_size}"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.ref_counts: list[int] = [0] * num_blocks
        self.digests: list[int | None] = [None] * num_blocks
        self.parents: list[int | None] = [None] * num_blocks
        self.published_steps: list[int] = [0] * num_blocks
        self.token_ids: npt.NDArray[np.int32] = np.zeros((num_blocks, block_size), np.int32)

    def published(self, block_ids: Sequence[int]) -> PublishedBlocks:
        """The prefix-cache entries of published blocks."""
        rows: Rows = np.empty(len(block_ids), entry_dtype(self.block_size))
        digests, parents, steps = self.digests, self.parents, self.published_steps
        rows["block_id"] = block_ids
        rows["digest"] = np.array([digests[block_id] for block_id in block_ids], np.uint64)
        before = [parents[block_id] for block_id in block_ids]
        rows["parent"] = np.array([0 if link is None else max(link, ~link) for link in before], np.uint64)
        has_parent = [link is not None and link >= 0 for link in before]
        rows["step_and_parent"] = [2 * steps[b] + has for b, has in zip(block_ids, has_parent, strict=True)]
        rows["token_ids"] = self.token_ids[np.array(block_ids, np.int64)]
        return PublishedBlocks(rows)
