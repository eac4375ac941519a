"""Whether tables, reference counts and free list tell one story."""

from collections import Counter
from collections.abc import Sequence
from itertools import islice

from kv_manager.block import Blocks
from kv_manager.block_table import BlockTable
from kv_manager.free_list import FreeList


def check_pool(tables: Sequence[BlockTable], blocks: Blocks, free_list: FreeList) -> None:
    """Assert it for `tables`, all that hold blocks: each block is free, or in as many tables as its reference count."""
    holders = Counter(block_id for table in tables for block_id in table.block_ids)
    for table in tables:
        assert len(set(table.block_ids)) == len(table.block_ids), f"a table holds a block twice: {table.block_ids}"
        assert not (table.block_ids and table.host_block_ids), "a table is in the pool and swapped out"
    wrong = [b for b, count in enumerate(blocks.ref_counts) if count != holders[b]]
    assert not wrong, f"reference counts differ from the tables' for blocks {wrong}"
    free = list(islice(free_list, blocks.num_blocks + 1))  # a broken list may not end
    assert len(free) == len(free_list) == len(set(free)), "a block is free twice, or the count is wrong"
    assert set(free) == set(range(blocks.num_blocks)) - holders.keys(), "free and held blocks are not the whole pool"
    plain = [not blocks.is_published[block_id] for block_id in free]
    assert plain == sorted(plain, reverse=True), "a cached block would be handed out before one without content"
