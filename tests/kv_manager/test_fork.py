"""Forks and copy on write: what is shared, what is copied, and who may write where. Blocks of 4 tokens unless said."""

from collections.abc import Callable
from typing import Any

import pytest

from kv_manager.allocation import PoolExhausted
from kv_manager.block_table import BlockTable

Serve = Callable[..., Any]


def ids(first: int, last: int) -> list[int]:
    return list(range(first, last + 1))


def forked(serving: Any, parent: Any, num_computed: int, num_tokens: int) -> tuple[BlockTable, Any]:
    """A child's table, which `serving` keeps an eye on, and the pairs to copy."""
    child = serving.track(parent.token_ids)
    pairs = serving.manager.fork(parent.table, child.table, num_computed, num_tokens)
    serving.check()
    return child.table, pairs


def test_a_child_shares_full_blocks_and_gets_a_copy_of_the_one_it_goes_on_in(serve: Serve) -> None:
    serving = serve()
    parent = serving.admit(ids(1, 10), num_tokens=11)
    serving.compute(parent)
    child, pairs = forked(serving, parent, 9, 11)
    assert child.block_ids[:2] == parent.table.block_ids[:2]
    assert pairs == [(parent.table.block_ids[2], child.block_ids[2])]
    assert child.block_ids[2] not in parent.table.block_ids
    assert serving.manager.num_free_blocks == 16 - 4


def test_a_last_position_that_opens_a_block_needs_no_copy(serve: Serve) -> None:
    serving = serve()
    parent = serving.admit(ids(1, 9), num_tokens=10)
    serving.compute(parent)
    child, pairs = forked(serving, parent, 8, 10)
    assert pairs == []
    assert child.block_ids[:2] == parent.table.block_ids[:2] and child.block_ids[2] != parent.table.block_ids[2]


def test_a_last_position_that_fills_a_block_is_computed_in_a_copy_of_it(serve: Serve) -> None:
    """The parent's own block is published whole: the child recomputes its last position elsewhere."""
    serving = serve()
    parent = serving.admit(ids(1, 8), num_tokens=9)
    serving.compute(parent)
    child, pairs = forked(serving, parent, 7, 9)
    assert pairs == [(parent.table.block_ids[1], child.block_ids[1])]
    assert len(child.block_ids) == 3


def test_several_children_share_one_parent(serve: Serve) -> None:
    serving = serve()
    parent = serving.admit(ids(1, 10))
    serving.compute(parent)
    tables = [forked(serving, parent, 9, 11)[0] for _ in range(3)]
    assert len({table.block_ids[2] for table in tables}) == 3
    serving.manager.seal_batch()
    assert serving.manager._blocks.ref_counts[parent.table.block_ids[0]] == 4
    serving.free(parent)
    for sequence in list(serving.running):
        serving.free(sequence)
    assert serving.manager.num_free_blocks == 16


def test_a_block_about_to_be_copied_goes_to_nobody_else(serve: Serve) -> None:
    """The batch swaps in and zeroes after it copies, but it copies in any order: nothing may be written where it copies from."""
    serving = serve(num_blocks=4)
    parent = serving.admit(ids(1, 6))
    serving.compute(parent)
    forked(serving, parent, 5, 6)
    serving.free(parent)
    assert serving.admit(ids(11, 18)) == PoolExhausted(needed=2, free=1)
    serving.manager.seal_batch()
    assert len(serving.admit(ids(11, 18)).table.block_ids) == 2


def test_a_prefix_is_evicted_after_what_was_copied_behind_it(serve: Serve) -> None:
    serving = serve()
    parent = serving.admit(ids(1, 8))
    serving.compute(parent)
    forked(serving, parent, 7, 9)
    head, tail = parent.table.block_ids
    for sequence in list(serving.running):
        serving.free(sequence)
    serving.manager.seal_batch()
    order = list(serving.manager._free)
    assert order.index(tail) < order.index(head)


def test_parent_and_child_publish_their_own_continuations(serve: Serve) -> None:
    serving = serve()
    parent = serving.admit(ids(1, 6), num_tokens=8)
    serving.compute(parent)
    child, _ = forked(serving, parent, 5, 8)
    other = serving.running[-1]
    parent.token_ids += [50, 51]
    other.token_ids += [60, 61]
    serving.compute(parent)
    serving.compute(other)
    assert {entry.token_ids for entry in serving.manager.published()} == {(1, 2, 3, 4), (5, 6, 50, 51), (5, 6, 60, 61)}
    digests = serving.manager._blocks.digests
    (shared, own), (also_shared, other_own) = (
        [digests[block_id] for block_id in t.block_ids[:2]] for t in (child, parent.table)
    )
    assert shared == also_shared and own != other_own


def test_a_fork_that_does_not_fit_changes_nothing(serve: Serve) -> None:
    serving = serve(num_blocks=4)
    parent = serving.admit(ids(1, 10))
    serving.compute(parent)
    child, outcome = forked(serving, parent, 9, 13)
    assert outcome == PoolExhausted(needed=2, free=1)
    assert child == BlockTable()


def test_without_caching_full_blocks_are_shared_all_the_same(serve: Serve) -> None:
    serving = serve(enable_prefix_caching=False)
    parent = serving.admit(ids(1, 10))
    serving.compute(parent)
    child, pairs = forked(serving, parent, 9, 11)
    assert child.block_ids[:2] == parent.table.block_ids[:2] and len(pairs) == 1
    assert child.num_published == 0


def test_blocks_of_one_token_are_all_shared(serve: Serve) -> None:
    serving = serve(block_size=1)
    parent = serving.admit(ids(1, 5))
    serving.compute(parent)
    child, pairs = forked(serving, parent, 4, 6)
    assert pairs == []
    assert child.block_ids[:4] == parent.table.block_ids[:4] and len(child.block_ids) == 6


def test_blocks_that_could_not_be_published_are_copied(serve: Serve) -> None:
    """Otherwise the one that published them first would leave the other with a block whose content it does not know."""
    serving = serve()
    parent = serving.admit(ids(1, 10))
    serving.compute(parent, num_tokens=4)
    child, pairs = forked(serving, parent, 9, 11)
    assert child.block_ids[0] == parent.table.block_ids[0]
    assert pairs == [(parent.table.block_ids[1], child.block_ids[1]), (parent.table.block_ids[2], child.block_ids[2])]


def test_a_write_into_a_shared_block_goes_to_a_copy(serve: Serve) -> None:
    serving = serve()
    first = serving.admit(ids(1, 9))
    serving.compute(first)
    second = serving.admit(ids(1, 9))
    shared = list(first.table.block_ids)
    pairs = serving.manager.copy_on_write(second.table, 6)
    serving.check()
    assert pairs == [(shared[1], second.table.block_ids[1])]
    assert first.table.block_ids.tolist() == shared and second.table.block_ids[0] == shared[0]
    assert (second.table.num_published, len(second.table.digests)) == (1, 0)
    second.token_ids = [*ids(1, 6), 70, 71, 72]
    serving.compute(second)
    assert {entry.token_ids for entry in serving.manager.published()} == {(1, 2, 3, 4), (5, 6, 7, 8), (5, 6, 70, 71)}


def test_a_write_into_a_published_block_leaves_the_cache_entry(serve: Serve) -> None:
    serving = serve()
    sequence = serving.admit(ids(1, 8))
    serving.compute(sequence)
    old = list(sequence.table.block_ids)
    assert serving.manager.copy_on_write(sequence.table, 4) == [], "nothing of the block is kept: there is nothing to copy"
    sequence.token_ids = [*ids(1, 4), 70, 71, 72, 73]
    serving.compute(sequence)
    assert sequence.table.block_ids[0] == old[0] and sequence.table.block_ids[1] != old[1]
    assert serving.manager.match(BlockTable(), ids(1, 9)).block_ids == old


def test_a_write_into_a_block_of_its_own_stays_there(serve: Serve) -> None:
    serving = serve()
    sequence = serving.admit(ids(1, 10))
    serving.compute(sequence)
    old = list(sequence.table.block_ids)
    assert serving.manager.copy_on_write(sequence.table, 9) == []
    assert sequence.table.block_ids.tolist() == old and sequence.table.num_published == 2


def test_a_copy_that_does_not_fit_changes_nothing(serve: Serve) -> None:
    serving = serve(num_blocks=3)
    first = serving.admit(ids(1, 9))
    serving.compute(first)
    before = list(first.table.block_ids)
    assert serving.manager.copy_on_write(first.table, 2) == PoolExhausted(needed=2, free=0)
    assert first.table.block_ids.tolist() == before and first.table.num_published == 2
    serving.check()


@pytest.mark.parametrize("num_computed", [12, 13])
def test_more_shared_than_the_parent_holds_is_our_bug(serve: Serve, num_computed: int) -> None:
    serving = serve()
    parent = serving.admit(ids(1, 8))
    with pytest.raises(AssertionError, match="does not cover"):
        serving.manager.fork(parent.table, BlockTable(), num_computed, 20)
