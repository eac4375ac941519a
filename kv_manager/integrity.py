"""Whether tables, reference counts and free list tell one story."""

from collections.abc import Sequence

import numpy as np

from kv_manager.block import Blocks
from kv_manager.block_table import BlockTable
from kv_manager.free_list import FreeList


def check_pool(tables: Sequence[BlockTable], blocks: Blocks, free_list: FreeList) -> None:
    """Assert it for `tables`, all that hold blocks: each block is free, or in as many tables as its reference count. Of a pool of a million blocks, most
    of them without content, it takes some milliseconds: a leader does it between two turns."""
    for table in tables:
        assert len(set(table.block_ids)) == len(table.block_ids), f"a table holds a block twice: {table.block_ids}"
        assert not (table.block_ids and table.host_block_ids), "a table is in the pool and swapped out"
    held = [np.frombuffer(table.block_ids, np.int32) for table in tables if table.block_ids]
    holders = np.bincount(np.concatenate(held) if held else np.empty(0, np.int32), minlength=blocks.num_blocks)
    wrong = np.flatnonzero(blocks.ref_counts_view != holders)
    assert not len(wrong), f"reference counts differ from the tables' for blocks {wrong.tolist()}"
    free = free_list.ids(blocks.num_blocks + 1)  # a broken list may not end
    times_free = np.bincount(free, minlength=blocks.num_blocks)
    assert len(free) == len(free_list) and times_free.max() <= 1, "a block is free twice, or the count is wrong"
    assert np.array_equal(times_free == 0, holders > 0), "free and held blocks are not the whole pool"
    is_cached = blocks.is_published_view[free]
    assert not (is_cached[:-1] & ~is_cached[1:]).any(), "a cached block would be handed out before one without content"
