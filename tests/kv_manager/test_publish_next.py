"""Blocks of many sequences published at once are published as if one after the other."""

from random import Random

import numpy as np
import pytest

from kv_manager.block_manager import PREFIX_INDEXES, BlockManager
from kv_manager.block_table import BlockTable

BLOCK_SIZE = 4


def begun(manager: BlockManager, token_ids: list[int], num_computed: int) -> BlockTable:
    """A table for these tokens and one more block, published as far as computed."""
    table = BlockTable()
    manager.allocate(table, manager.match(table, token_ids), len(token_ids) + BLOCK_SIZE)
    manager.publish(table, token_ids, num_computed, 1)
    return table


def life(seed: int, kind: str, at_once: bool) -> tuple[list[object], int]:
    """All that a journal hears while sequences decode block by block, some with the same tokens; and how many were published at once."""
    rng = Random(seed)
    manager = BlockManager(512, BLOCK_SIZE, b"weights", prefix_index=kind)
    sequences = [[rng.randrange(3) for _ in range(BLOCK_SIZE * rng.randint(1, 2))] for _ in range(6)]
    tables = [begun(manager, ids, len(ids)) for ids in sequences]
    told: list[object] = [manager.take_changes()]
    num_at_once = 0
    for step in range(2, 40):
        for ids in sequences:
            ids.extend(rng.randrange(3 if rng.random() < 0.3 else 50) for _ in range(BLOCK_SIZE))
        manager.append_next(tables)
        rows = np.array([ids[-BLOCK_SIZE:] for ids in sequences], np.int32)
        nums_full = [len(ids) // BLOCK_SIZE for ids in sequences]
        num_done = manager.publish_next(tables, nums_full, rows, step) if at_once else 0
        for table, ids in zip(tables[num_done:], sequences[num_done:], strict=True):
            manager.publish(table, ids, len(ids), step)
        num_at_once += num_done
        if rng.random() < 0.2:
            manager.forget_unused() if rng.random() < 0.2 else None
            index = rng.randrange(len(tables))
            manager.free(tables[index])
            tables[index] = begun(manager, sequences[index], len(sequences[index]) - 1)
        told.append(manager.take_changes())
        manager.check_integrity(tables)
    return told, num_at_once


@pytest.mark.parametrize("kind", PREFIX_INDEXES)
@pytest.mark.parametrize("seed", range(8))
def test_the_journal_hears_the_same(seed: int, kind: str) -> None:
    told, num_at_once = life(seed, kind, at_once=True)
    assert told == life(seed, kind, at_once=False)[0]
    assert num_at_once or kind == "radix"


def test_it_stops_at_a_known_digest() -> None:
    manager = BlockManager(64, BLOCK_SIZE)
    ids = [1, 2, 3, 4]
    tables = [begun(manager, [*ids], 4), begun(manager, [5, *ids[1:]], 4)]
    rows = np.array([ids, ids], np.int32)
    manager.append_next(tables)
    assert manager.publish_next(tables, [2, 2], rows, 2) == 2
    twin = begun(manager, [*ids, 9], 4)
    manager.append_next(tables)
    before = list(manager.published())
    assert manager.publish_next([twin, tables[1]], [2, 3], rows, 3) == 0, (
        "the twin's block has the content of the first table's"
    )
    assert list(manager.published()) == before
    assert manager.publish_next([tables[1], twin], [3, 2], rows, 3) == 1
    manager.check_integrity([*tables, twin])


def test_without_prefix_caching_there_is_nothing_to_publish() -> None:
    manager = BlockManager(64, BLOCK_SIZE, enable_prefix_caching=False)
    table = begun(manager, [1, 2, 3, 4], 4)
    assert manager.publish_next([table], [1], np.array([[1, 2, 3, 4]], np.int32), 2) == 1
    assert not list(manager.published())


def test_a_block_for_each_of_many_is_what_each_alone_would_get() -> None:
    one, other = BlockManager(16, BLOCK_SIZE, secure_zero=True), BlockManager(16, BLOCK_SIZE, secure_zero=True)
    theirs = [begun(one, [n] * 4, 4) for n in range(3)]
    ours = [begun(other, [n] * 4, 4) for n in range(3)]
    assert one.append_next(theirs) == [block_id for table in ours for block_id in other.append(table, 9)]  # type: ignore[union-attr]
    assert [table.block_ids for table in theirs] == [table.block_ids for table in ours]
    assert one.seal_batch() == other.seal_batch()
