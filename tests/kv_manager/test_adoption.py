"""A new scheduler's manager, rebuilt from live tables and journalled entries, against the one that died."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kv_manager.adoption import table_entries
from kv_manager.block_manager import BlockManager
from kv_manager.block_table import BlockTable, HeldTable
from kv_manager.prefix_cache import BlockChanges
from kv_manager.published_block import PublishedBlock

Serve = Callable[..., Any]


def ids(first: int, last: int) -> list[int]:
    return list(range(first, last + 1))


def held(sequence: Any, num_computed: int | None = None) -> HeldTable:
    """What the worker reports of a sequence: the same blocks in a table of its own."""
    table = BlockTable(block_ids=sequence.table.block_ids[:])
    return HeldTable(table, sequence.token_ids, len(sequence.token_ids) if num_computed is None else num_computed)


def adopted(
    serving: Any, tables: list[HeldTable], entries: list[PublishedBlock], step: int = 99, **options: Any
) -> BlockManager:
    manager = BlockManager(serving.manager.num_blocks, serving.manager.block_size, **options)
    told = manager.adopt(tables, entries, step)
    assert sorted(told, key=lambda entry: entry.block_id) == list(manager.published())
    manager.check_integrity([item.table for item in tables])
    return manager


def journal_of(serving: Any) -> list[PublishedBlock]:
    return list(serving.manager.published())


def test_the_rebuilt_state_equals_the_live_one(serve: Serve) -> None:
    serving = serve(num_blocks=12)
    serving.run(ids(1, 12))
    serving.run(ids(21, 32))
    first = serving.admit([*ids(1, 8), *ids(41, 49)])
    serving.compute(first)
    second = serving.admit([*ids(1, 8), *ids(41, 43)], num_tokens=16)
    serving.compute(second)
    tables = [held(first), held(second)]
    manager = adopted(serving, tables, journal_of(serving))
    assert manager.published() == serving.manager.published()
    assert manager.num_free_blocks == serving.manager.num_free_blocks
    assert manager._blocks.ref_counts == serving.manager._blocks.ref_counts
    assert [item.table for item in tables] == [first.table, second.table]
    assert manager.take_changes() == BlockChanges((), ())
    for prompt in (ids(1, 13), ids(21, 33), [*ids(1, 8), *ids(41, 50)]):
        ours, theirs = manager.match(BlockTable(), prompt), serving.manager.match(BlockTable(), prompt)
        assert (ours.block_ids, set(ours.free_block_ids)) == (theirs.block_ids, set(theirs.free_block_ids))


def test_changes_replayed_are_the_published_entries(serve: Serve) -> None:
    serving = serve(num_blocks=4)
    mirror: dict[int, PublishedBlock] = {}
    for first in (1, 101, 1, 201):
        serving.run(ids(first, first + 11))
        changes = serving.manager.take_changes()
        for _ in range(2):
            for block_id in changes.unpublished:
                mirror.pop(block_id, None)
            mirror.update({entry.block_id: entry for entry in changes.published})
        assert mirror == {entry.block_id: entry for entry in serving.manager.published()}
    assert serving.manager.take_changes() == BlockChanges((), ())


def test_an_entry_says_what_the_journal_needs(serve: Serve) -> None:
    serving = serve()
    serving.run([1, 2, 3, 4, 5, 6, 7, 8])
    assert serving.manager.take_changes().published == (
        PublishedBlock(0, 8356527653647720045, None, (1, 2, 3, 4), 1),
        PublishedBlock(1, 610383040053763902, 8356527653647720045, (5, 6, 7, 8), 1),
    )


def test_cached_blocks_in_no_table_become_free_and_hittable(serve: Serve) -> None:
    serving = serve(num_blocks=6)
    serving.run(ids(1, 9))
    manager = adopted(serving, [], journal_of(serving))
    assert manager.num_free_blocks == 6
    match = manager.match(BlockTable(), ids(1, 9))
    assert match.num_cached_tokens == 8
    assert set(match.free_block_ids) == {0, 1}


def test_a_computed_block_the_journal_missed_is_published(serve: Serve) -> None:
    """The store was steps behind: nothing that a worker holds is computed again."""
    serving = serve()
    sequence = serving.admit(ids(1, 12))
    serving.compute(sequence)
    entries = journal_of(serving)
    manager = adopted(serving, [held(sequence)], entries[:1], step=7)
    assert [entry.published_step for entry in manager.published()] == [1, 7, 7]
    assert [entry.block_id for entry in manager.take_changes().published] == [1, 2]
    assert manager.match(BlockTable(), ids(1, 12)).num_cached_tokens == 8


def test_an_entry_of_a_block_its_holder_has_not_filled_goes(serve: Serve) -> None:
    """Block 1 went to another sequence and was not written yet: its old KV is still there, but not for long."""
    serving = serve(num_blocks=2)
    serving.run(ids(1, 8))
    stale = journal_of(serving)
    other = serving.admit(ids(101, 108))
    manager = adopted(serving, [held(other, num_computed=0)], stale)
    assert manager.published() == ()
    assert set(manager.take_changes().unpublished) == {0, 1}
    assert manager.match(BlockTable(), ids(1, 9)).num_cached_tokens == 0


def test_an_entry_whose_prefix_is_gone_goes(serve: Serve) -> None:
    serving = serve()
    serving.run(ids(1, 12))
    entries = journal_of(serving)
    manager = adopted(serving, [], [entries[0], entries[2]])
    assert manager.published() == (entries[0],)
    assert manager.take_changes() == BlockChanges((), (entries[2].block_id,))


def test_an_entry_may_continue_a_held_block(serve: Serve) -> None:
    serving = serve()
    serving.run(ids(1, 12))
    sharer = serving.admit([*ids(1, 4), 9])
    manager = adopted(serving, [held(sharer)], journal_of(serving))
    assert manager.match(BlockTable(), ids(1, 13)).num_cached_tokens == 12


def test_of_two_entries_for_one_block_the_later_counts(serve: Serve) -> None:
    serving = serve()
    serving.run(ids(1, 4))
    serving.run(ids(11, 14))
    old, new = journal_of(serving)
    old = PublishedBlock(new.block_id, old.digest, old.parent, old.token_ids, old.published_step)
    assert adopted(serving, [], [old, new]).published() == (new,)


def test_tails_and_old_prefixes_are_evicted_first(serve: Serve) -> None:
    """The journal has no release times: an old prefix goes before a newer one, and a head after all that continues it."""
    serving = serve(num_blocks=8)
    serving.run(ids(1, 12))
    serving.run(ids(21, 28))
    serving.run([*ids(1, 4), *ids(31, 34)])
    entries = journal_of(serving)
    manager = adopted(serving, [], entries[::-1])
    order = [block_id for block_id in manager._free if manager._blocks.is_published[block_id]]
    tokens = {entry.block_id: entry.token_ids[0] for entry in entries}
    assert [tokens[block_id] for block_id in order] == [9, 5, 25, 21, 31, 1]


def test_a_sequence_goes_on_after_adoption(serve: Serve) -> None:
    serving = serve(num_blocks=4)
    sequence = serving.admit(ids(1, 6), num_tokens=7)
    serving.compute(sequence)
    item = held(sequence)
    manager = adopted(serving, [item], journal_of(serving))
    assert manager.append(item.table, 9) == [2]
    manager.publish(item.table, ids(1, 9), 8, 100)
    assert [entry.token_ids for entry in manager.published()] == [(1, 2, 3, 4), (5, 6, 7, 8)]
    manager.free(item.table)
    manager.check_integrity([])
    assert manager.num_free_blocks == 4


def test_with_caching_off_entries_are_given_up(serve: Serve) -> None:
    serving = serve()
    serving.run(ids(1, 8))
    manager = adopted(serving, [], journal_of(serving), enable_prefix_caching=False)
    assert manager.take_changes() == BlockChanges((), (0, 1))


def test_a_used_manager_does_not_adopt(serve: Serve) -> None:
    serving = serve()
    serving.admit(ids(1, 4))
    with pytest.raises(AssertionError, match="only an unused manager"):
        serving.manager.adopt([], [], 0)


@pytest.mark.parametrize("namespace", [b"", b"weights"])
def test_table_entries_are_what_publishing_would_have_made(serve: Serve, namespace: bytes) -> None:
    serving = serve(namespace=namespace)
    sequence = serving.admit(ids(1, 10))
    for num_tokens in (4, 10):
        serving.compute(sequence, num_tokens)
    last_write_steps = np.zeros(16, np.int64)
    last_write_steps[sequence.table.block_ids] = [1, 2, 2]
    assert table_entries(held(sequence), 4, namespace, last_write_steps) == journal_of(serving)
    assert table_entries(held(sequence, num_computed=7), 4, namespace, last_write_steps) == journal_of(serving)[:1]
    assert table_entries(held(sequence, num_computed=3), 4, namespace, last_write_steps) == []
