"""Forgetting what nobody holds while sequences run. Blocks of 4 tokens."""

from collections.abc import Callable
from typing import Any

import pytest

from kv_manager.block_table import BlockTable

Serve = Callable[..., Any]


def ids(first: int, last: int) -> list[int]:
    return list(range(first, last + 1))


def reset(serving: Any) -> int:
    count = serving.manager.forget_unused()
    serving.check()
    return count


def hits(serving: Any, token_ids: list[int]) -> int:
    return serving.manager.match(BlockTable(), token_ids).num_cached_tokens


def test_what_nobody_holds_is_hit_no_more(serve: Serve) -> None:
    serving = serve()
    serving.run(ids(1, 9))
    running = serving.admit(ids(21, 29))
    serving.compute(running)
    assert reset(serving) == 2
    assert (hits(serving, ids(1, 9)), hits(serving, ids(21, 29))) == (0, 8)
    assert {entry.block_id for entry in serving.manager.published()} == set(running.table.block_ids[:2])
    assert serving.manager.num_cached_blocks == 2
    assert list(serving.manager._free) == sorted(serving.manager._free), "free blocks are without content, lowest id first"
    assert reset(serving) == 0


def test_the_journal_learns_it(serve: Serve) -> None:
    serving = serve()
    serving.run(ids(1, 9))
    published = {entry.block_id for entry in serving.manager.take_changes().published}
    reset(serving)
    changes = serving.manager.take_changes()
    assert (changes.published, set(changes.unpublished)) == ((), published)


def test_a_prefix_that_one_table_holds_stays_and_what_others_put_behind_it_goes(serve: Serve) -> None:
    serving = serve()
    running = serving.admit(ids(1, 9), num_tokens=16)
    serving.compute(running)
    serving.run([*ids(1, 8), *ids(31, 35)])
    assert hits(serving, [*ids(1, 8), *ids(31, 35)]) == 12
    assert reset(serving) == 1
    assert hits(serving, [*ids(1, 8), *ids(31, 35)]) == 8
    running.token_ids += ids(10, 16)
    serving.compute(running)
    serving.free(running)
    assert hits(serving, ids(1, 17)) == 16, "it goes on publishing, and what it held is cached"


def test_a_table_swapped_out_before_it_comes_back_whole_and_is_published_again(serve: Serve) -> None:
    serving = serve(num_host_blocks=4)
    sequence = serving.admit(ids(1, 9))
    serving.compute(sequence)
    serving.manager.swap_out(sequence.table, 9)
    assert reset(serving) == 2
    match = serving.manager.match(sequence.table, ids(1, 9))
    assert match.block_ids == []
    assert len(serving.manager.swap_in(sequence.table, match, 10)) == 3
    serving.compute(sequence)
    assert len(serving.manager.published()) == 2


def test_a_match_from_before_it_is_void(serve: Serve) -> None:
    serving = serve()
    serving.run(ids(1, 9))
    table = BlockTable()
    match = serving.manager.match(table, ids(1, 9))
    reset(serving)
    with pytest.raises(AssertionError, match="the pool changed since the match"):
        serving.manager.allocate(table, match, 9)


def test_statistics_go_on(serve: Serve) -> None:
    serving = serve()
    serving.run(ids(1, 9))
    serving.run(ids(1, 9))
    reset(serving)
    serving.run(ids(1, 9))
    stats = serving.manager.stats
    assert (stats.query_requests, stats.hit_requests, stats.query_tokens, stats.hit_tokens) == (3, 1, 27, 8)
