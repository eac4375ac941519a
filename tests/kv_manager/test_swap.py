"""Swapping tables to host blocks and back. Blocks of 4 tokens."""

from collections.abc import Callable
from typing import Any

import pytest

from kv_manager.allocation import PoolExhausted
from kv_manager.block_manager import BlockManager
from kv_manager.block_table import BlockTable, HeldTable
from kv_manager.host_pool import HostPool, HostPoolExhausted

Serve = Callable[..., Any]


def ids(first: int, last: int) -> list[int]:
    return list(range(first, last + 1))


def computed(serving: Any, token_ids: list[int], **kwargs: int) -> Any:
    sequence = serving.admit(token_ids, **kwargs)
    serving.compute(sequence)
    return sequence


def swap_in(serving: Any, sequence: Any, num_computed: int, num_tokens: int) -> Any:
    match = serving.manager.match(sequence.table, sequence.token_ids[: num_computed + 1])
    needed, free = serving.manager.blocks_needed(match, num_tokens), serving.manager.num_free_blocks
    outcome = serving.manager.swap_in(sequence.table, match, num_tokens)
    serving.check()
    if not isinstance(outcome, PoolExhausted):
        assert free - serving.manager.num_free_blocks == needed
    return outcome


def test_a_table_moves_to_the_host_block_by_block(serve: Serve) -> None:
    serving = serve(num_host_blocks=5)
    sequence = computed(serving, ids(1, 10), num_tokens=16)
    old = list(sequence.table.block_ids)
    pairs = serving.manager.swap_out(sequence.table, 10)
    serving.check()
    assert pairs == [(old[0], 0), (old[1], 1), (old[2], 2)], "the fourth block holds nothing yet"
    assert sequence.table.host_block_ids == (0, 1, 2) and sequence.table.block_ids.tolist() == []
    assert (serving.manager.num_free_blocks, serving.manager.num_free_host_blocks) == (16, 2)


def test_blocks_still_cached_need_no_copy_on_the_way_back(serve: Serve) -> None:
    serving = serve(num_host_blocks=4)
    sequence = computed(serving, ids(1, 10))
    old = list(sequence.table.block_ids)
    serving.manager.swap_out(sequence.table, 10)
    pairs = swap_in(serving, sequence, 9, 12)
    assert sequence.table.block_ids[:2].tolist() == old[:2]
    assert pairs == [(2, sequence.table.block_ids[2])]
    assert (sequence.table.host_block_ids, sequence.table.num_published) == ((), 2)
    assert serving.manager.stats.resume_cached_tokens == 8 and serving.manager.stats.hit_tokens == 0


def test_blocks_evicted_meanwhile_come_from_the_host(serve: Serve) -> None:
    serving = serve(num_blocks=4, num_host_blocks=4)
    sequence = computed(serving, ids(1, 10))
    serving.manager.swap_out(sequence.table, 10)
    serving.run(ids(101, 116))
    pairs = swap_in(serving, sequence, 9, 11)
    assert pairs == list(zip((0, 1, 2), sequence.table.block_ids, strict=True))
    assert sequence.table.num_published == 0
    serving.compute(sequence)
    assert sequence.table.num_published == 2, "published again once it has run"
    assert serving.manager.match(BlockTable(), ids(1, 9)).num_cached_tokens == 8


def test_a_full_host_pool_refuses_with_numbers_and_changes_nothing(serve: Serve) -> None:
    serving = serve(num_host_blocks=2)
    sequence = computed(serving, ids(1, 10))
    old = list(sequence.table.block_ids)
    assert serving.manager.swap_out(sequence.table, 10) == HostPoolExhausted(needed=3, free=2)
    assert sequence.table.block_ids.tolist() == old and sequence.table.num_published == 2
    without = serve()
    assert without.manager.swap_out(computed(without, ids(1, 4)).table, 4) == HostPoolExhausted(needed=1, free=0)


def test_a_full_pool_keeps_a_table_on_the_host(serve: Serve) -> None:
    serving = serve(num_blocks=4, num_host_blocks=4)
    sequence = computed(serving, ids(1, 10))
    serving.manager.swap_out(sequence.table, 10)
    serving.admit(ids(101, 108))
    assert swap_in(serving, sequence, 9, 12) == PoolExhausted(needed=3, free=2)
    assert sequence.table.host_block_ids == (0, 1, 2)


def test_host_blocks_that_a_batch_reads_are_free_after_it(serve: Serve) -> None:
    """A batch swaps out before it swaps in: what it reads it must not have overwritten."""
    serving = serve(num_host_blocks=3)
    first, second = computed(serving, ids(1, 10)), computed(serving, ids(21, 30))
    serving.manager.swap_out(first.table, 10)
    serving.manager.seal_batch()
    swap_in(serving, first, 9, 11)
    assert serving.manager.swap_out(second.table, 10) == HostPoolExhausted(needed=3, free=0)
    serving.manager.seal_batch()
    assert len(serving.manager.swap_out(second.table, 10)) == 3
    serving.check()


def test_a_swapped_table_that_ends_gives_up_its_host_blocks_at_once(serve: Serve) -> None:
    serving = serve(num_host_blocks=3)
    sequence = computed(serving, ids(1, 10))
    serving.manager.swap_out(sequence.table, 10)
    serving.free(sequence)
    assert (serving.manager.num_free_host_blocks, sequence.table.host_block_ids) == (3, ())


def test_a_match_never_reaches_beyond_what_the_sequence_has_computed(serve: Serve) -> None:
    """Another sequence has computed more of the same prompt: the rest is computed in blocks of its own, not in shared ones."""
    serving = serve(num_host_blocks=4)
    sequence = serving.admit(ids(1, 12))
    serving.compute(sequence, num_tokens=6)
    serving.manager.swap_out(sequence.table, 6)
    serving.run(ids(1, 12))
    pairs = swap_in(serving, sequence, 6, 12)
    assert sequence.table.num_published == 1 and len(pairs) == 1
    match = serving.manager.match(BlockTable(), ids(1, 12))
    assert not set(match.block_ids[1:]) & set(sequence.table.block_ids)


def test_a_match_beyond_what_is_computed_is_our_bug(serve: Serve) -> None:
    serving = serve(num_host_blocks=4)
    sequence = serving.admit(ids(1, 12))
    serving.compute(sequence, num_tokens=4)
    serving.manager.swap_out(sequence.table, 4)
    match = serving.manager.match(sequence.table, sequence.token_ids)
    with pytest.raises(AssertionError, match="beyond what is computed"):
        serving.manager.swap_in(sequence.table, match, 12)


def test_shared_blocks_are_copied_out_and_stay_with_their_other_holder(serve: Serve) -> None:
    serving = serve(num_host_blocks=4)
    first = computed(serving, ids(1, 9))
    second = computed(serving, [*ids(1, 8), 20])
    shared = first.table.block_ids[:2].tolist()
    pairs = serving.manager.swap_out(second.table, 9)
    serving.check()
    assert [source for source, _ in pairs[:2]] == shared == first.table.block_ids[:2].tolist()
    assert len(swap_in(serving, second, 8, 10)) == 1, "and need no copy on the way back"


def test_swapped_tables_are_adopted_with_their_host_blocks(serve: Serve) -> None:
    serving = serve(num_blocks=6, num_host_blocks=4)
    running, swapped = computed(serving, ids(1, 5)), computed(serving, ids(21, 30))
    serving.manager.swap_out(swapped.table, 10)
    tables = [BlockTable(block_ids=running.table.block_ids[:]), BlockTable(host_block_ids=swapped.table.host_block_ids)]
    manager = BlockManager(6, 4, num_host_blocks=4)
    manager.adopt(
        [HeldTable(tables[0], running.token_ids, 5), HeldTable(tables[1], swapped.token_ids, 9)],
        serving.manager.published(),
        step=9,
    )
    manager.check_integrity(tables)
    assert (manager.num_free_blocks, manager.num_free_host_blocks) == (4, 1)
    match = manager.match(tables[1], ids(21, 30))
    assert match.num_cached_tokens == 8
    assert len(manager.swap_in(tables[1], match, 11)) == 1
    manager.check_integrity(tables)


def test_a_lost_host_block_is_found() -> None:
    pool = HostPool(3)
    pool.check_integrity(pool.take(2))
    with pytest.raises(AssertionError, match="host blocks are lost"):
        pool.check_integrity([0])
