"""Forgetting the whole prefix cache while sequences run. Blocks of 4 tokens."""

from collections.abc import Callable
from typing import Any

import pytest

from kv_manager.block_manager import BlockManager
from kv_manager.block_table import BlockTable, HeldTable

Serve = Callable[..., Any]


def ids(first: int, last: int) -> list[int]:
    return list(range(first, last + 1))


def reset(serving: Any) -> int:
    count = serving.manager.reset_cache()
    serving.check()
    return count


def hits(serving: Any, token_ids: list[int]) -> int:
    return serving.manager.match(BlockTable(), token_ids).num_cached_tokens


def test_nothing_free_or_held_is_hit_any_more(serve: Serve) -> None:
    serving = serve()
    serving.run(ids(1, 9))
    running = serving.admit(ids(21, 29))
    serving.compute(running)
    assert reset(serving) == 4
    assert hits(serving, ids(1, 9)) == hits(serving, ids(21, 29)) == 0
    assert serving.manager.published() == ()
    assert list(serving.manager._free) == sorted(serving.manager._free), "free blocks are without content, lowest id first"


def test_the_journal_learns_it(serve: Serve) -> None:
    serving = serve()
    serving.run(ids(1, 9))
    published = {entry.block_id for entry in serving.manager.take_changes().published}
    reset(serving)
    changes = serving.manager.take_changes()
    assert (changes.published, set(changes.unpublished)) == ((), published)


def test_a_held_table_goes_on_and_publishes_nothing_more(serve: Serve) -> None:
    """Its next full block continues blocks whose KV nobody is to hit."""
    serving = serve()
    running = serving.admit(ids(1, 9), num_tokens=16)
    serving.compute(running)
    blocks = list(running.table.block_ids)
    reset(serving)
    running.token_ids += ids(10, 16)
    serving.compute(running)
    assert running.table.block_ids.tolist() == blocks and serving.manager.published() == ()
    serving.free(running)
    assert hits(serving, ids(1, 16)) == 0 and serving.manager.num_free_blocks == 16


def test_what_is_computed_after_it_is_hit(serve: Serve) -> None:
    serving = serve()
    before = serving.admit(ids(1, 9))
    serving.compute(before)
    reset(serving)
    assert serving.run(ids(1, 9)).num_cached_tokens == 0
    assert serving.run(ids(1, 9)).num_cached_tokens == 8
    serving.compute(before)
    serving.free(before)
    assert hits(serving, ids(1, 9)) == 8


def test_a_table_admitted_again_publishes_again(serve: Serve) -> None:
    serving = serve()
    sequence = serving.admit(ids(1, 9))
    serving.compute(sequence)
    reset(serving)
    serving.free(sequence)
    again = serving.admit(sequence.token_ids, resumed=sequence)
    assert again.num_cached_tokens == 0
    serving.compute(again)
    assert hits(serving, ids(1, 9)) == 8


def test_a_table_swapped_out_before_it_comes_back_whole_and_silent(serve: Serve) -> None:
    serving = serve(num_host_blocks=4)
    sequence = serving.admit(ids(1, 9))
    serving.compute(sequence)
    serving.manager.swap_out(sequence.table, 9)
    reset(serving)
    serving.run(ids(1, 9))
    match = serving.manager.match(sequence.table, ids(1, 9))
    assert match.block_ids == []
    assert len(serving.manager.swap_in(sequence.table, match, 10)) == 3
    serving.compute(sequence)
    assert len(serving.manager.published()) == 2, "those of the other sequence alone"


def test_children_of_a_table_filled_before_it_share_its_silence(serve: Serve) -> None:
    serving = serve()
    parent = serving.admit(ids(1, 9))
    serving.compute(parent)
    reset(serving)
    child = serving.track(parent.token_ids)
    assert serving.manager.fork(parent.table, child.table, 8, 10) == []
    assert child.table.block_ids[:2] == parent.table.block_ids[:2]
    serving.compute(child)
    assert serving.manager.published() == ()


def test_a_match_from_before_it_is_void(serve: Serve) -> None:
    serving = serve()
    serving.run(ids(1, 9))
    table = BlockTable()
    match = serving.manager.match(table, ids(1, 9))
    reset(serving)
    with pytest.raises(AssertionError, match="the pool changed since the match"):
        serving.manager.allocate(table, match, 9)


def test_a_takeover_finds_what_is_still_held(serve: Serve) -> None:
    serving = serve()
    running = serving.admit(ids(1, 9))
    serving.compute(running)
    reset(serving)
    table = BlockTable(running.table.block_ids[:])
    manager = BlockManager(16, 4)
    manager.adopt([HeldTable(table, running.token_ids, 9)], serving.manager.published(), 9)
    manager.check_integrity([table])
    assert manager.match(BlockTable(), ids(1, 9)).num_cached_tokens == 8


def test_statistics_go_on(serve: Serve) -> None:
    serving = serve()
    serving.run(ids(1, 9))
    serving.run(ids(1, 9))
    reset(serving)
    serving.run(ids(1, 9))
    stats = serving.manager.stats
    assert (stats.query_requests, stats.hit_requests, stats.query_tokens, stats.hit_tokens) == (3, 1, 27, 8)
