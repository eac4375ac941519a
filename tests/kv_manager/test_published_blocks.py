"""Entries as one array read as the entries they were made of."""

import copy
from dataclasses import replace

import numpy as np
import pytest

from kv_manager.adoption import EntriesByBlock, table_entries
from kv_manager.block_table import BlockTable, HeldTable
from kv_manager.hash_chain import chain_digests
from kv_manager.published_block import PublishedBlock
from kv_manager.published_blocks import NO_BLOCKS, PublishedBlocks, entry_dtype

ENTRIES = (
    PublishedBlock(3, 2**64 - 1, None, (1, 2, 2**31 - 1), 0),
    PublishedBlock(2**32 - 1, 0, 0, (0, 0, 0), 2**62 - 1),
    PublishedBlock(3, 5, 2**64 - 1, (7, 8, 9), 12),
)
B = 4


def test_they_read_as_what_they_were_made_of() -> None:
    blocks = PublishedBlocks.of(iter(ENTRIES))
    assert blocks == ENTRIES and list(blocks) == list(ENTRIES) and len(blocks) == 3
    assert blocks[0] == ENTRIES[0] and blocks[-1] == ENTRIES[-1] and blocks[1:] == ENTRIES[1:]
    assert blocks != ENTRIES[:2] and blocks != (*ENTRIES[:2], replace(ENTRIES[2], digest=6))
    assert blocks.block_ids.tolist() == [3, 2**32 - 1, 3] and blocks.published_steps.tolist() == [0, 2**62 - 1, 12]
    assert PublishedBlocks.of(blocks) is blocks and copy.deepcopy(blocks) == ENTRIES


def test_a_row_has_no_gaps() -> None:
    assert entry_dtype(16).itemsize == 4 + 3 * 8 + 16 * 4


def test_parts_and_picks_keep_their_order() -> None:
    blocks = PublishedBlocks.of(ENTRIES)
    assert blocks.select(np.array([2, 0])) == (ENTRIES[2], ENTRIES[0])
    assert blocks.select(np.array([True, False, True])) == (ENTRIES[0], ENTRIES[2])
    assert PublishedBlocks.concatenate([blocks[2:], NO_BLOCKS, blocks[:1]]) == (ENTRIES[2], ENTRIES[0])
    assert PublishedBlocks.concatenate([]) == () == NO_BLOCKS


def test_an_index_is_not_beyond_the_end() -> None:
    with pytest.raises(IndexError):
        PublishedBlocks.of(ENTRIES)[3]


def table(num_blocks: int = 4) -> tuple[HeldTable, PublishedBlocks]:
    """A table of blocks 7, 6, ... with its entries."""
    ids = np.arange(num_blocks * B, dtype=np.int32)
    held = HeldTable(BlockTable([7 - index for index in range(num_blocks)]), ids, num_blocks * B)
    return held, table_entries(held, B, b"", np.zeros(8, np.int64))


def test_a_chain_that_entries_know_is_not_hashed() -> None:
    held, entries = table()
    rows = np.arange(4 * B, dtype=np.int32).reshape(4, B)
    assert EntriesByBlock(entries, 8).digests_of(np.array(held.table.block_ids), rows, None) == chain_digests(rows)


@pytest.mark.parametrize(
    "change",
    [{"token_ids": (0, 0, 0, 0)}, {"parent": 1}, {"parent": None}, {"block_id": 0}],
    ids=["other ids", "another prefix", "no prefix", "another block"],
)
def test_an_entry_that_says_otherwise_ends_what_is_known(change: dict[str, object]) -> None:
    held, entries = table()
    rows = np.arange(4 * B, dtype=np.int32).reshape(4, B)
    listed = list(entries)
    listed[2] = replace(listed[2], **change)  # type: ignore[arg-type]
    known = EntriesByBlock(PublishedBlocks.of(listed), 8).digests_of(np.array(held.table.block_ids), rows, None)
    assert known == chain_digests(rows)[:2]


def test_a_first_block_with_a_prefix_is_not_known() -> None:
    held, entries = table()
    listed = [replace(entries[0], parent=9), *entries[1:]]
    rows = np.arange(4 * B, dtype=np.int32).reshape(4, B)
    assert EntriesByBlock(PublishedBlocks.of(listed), 8).digests_of(np.array(held.table.block_ids), rows, None) == []


def test_of_two_entries_for_a_block_the_later_counts() -> None:
    by_block = EntriesByBlock(PublishedBlocks.of([replace(ENTRIES[0], block_id=1), replace(ENTRIES[2], block_id=1)]), 8)
    assert by_block.entries == (replace(ENTRIES[2], block_id=1),)


def test_a_table_that_knows_its_digests_is_believed() -> None:
    held, entries = table()
    again = HeldTable(BlockTable(held.table.block_ids, digests=held.table.digests[:2]), held.token_ids, held.num_computed)
    assert table_entries(again, B, b"", np.zeros(8, np.int64)) == entries
    assert again.table.digests == held.table.digests
