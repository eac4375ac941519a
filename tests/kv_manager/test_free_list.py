"""The order in which free blocks are handed out."""

import random

import pytest

from kv_manager.free_list import FreeList


def test_untouched_blocks_come_lowest_first() -> None:
    free = FreeList(4)
    assert free.take(3) == [0, 1, 2]
    assert list(free) == [3]


def test_a_returned_block_without_content_comes_before_higher_ones() -> None:
    free = FreeList(4)
    free.take(3)
    free.release_plain(2)
    free.release_plain(0)
    assert list(free) == [0, 2, 3]
    assert free.take(3) == [0, 2, 3]


def test_cached_blocks_come_last_and_least_recently_released_first() -> None:
    free = FreeList(4)
    free.take(4)
    free.release_cached([1, 0])
    free.release_cached([3])
    free.release_plain(2)
    assert free.take(4) == [2, 1, 0, 3]


def test_without_their_content_cached_blocks_are_like_any_other() -> None:
    free = FreeList(4)
    free.take(4)
    free.release_cached([3, 1])
    free.release_plain(2)
    assert free.strip_cached() == [3, 1]
    assert list(free) == [1, 2, 3] and free.strip_cached() == []


def test_a_cached_block_leaves_from_the_middle_and_comes_back_as_the_latest() -> None:
    free = FreeList(3)
    free.take(3)
    free.release_cached([0, 1, 2])
    free.take_cached([1])
    assert list(free) == [0, 2]
    free.release_cached([1])
    assert free.take(3) == [0, 2, 1]


def test_more_than_there_is_is_refused_and_changes_nothing() -> None:
    free = FreeList(2)
    with pytest.raises(AssertionError, match="3 blocks asked of 2 free"):
        free.take(3)
    assert list(free) == [0, 1]


def test_refill_replaces_everything() -> None:
    free = FreeList(6)
    free.take(4)
    free.release_cached([2])
    free.refill(plain=[5, 1], cached=[4, 0])
    assert list(free) == [1, 5, 4, 0]
    assert len(free) == 4


def test_order_against_the_naive_rule() -> None:
    """Ten thousand random moves beside two plain lists that say what the order is."""
    rng = random.Random(7)
    free, plain, cached, held = FreeList(40), list(range(40)), [], []
    for _ in range(10_000):
        move = rng.randrange(4)
        if move == 0:
            count = rng.randint(0, min(3, len(free)))
            expected = (sorted(plain) + cached)[:count]
            assert free.take(count) == expected
            plain = [b for b in plain if b not in expected]
            cached = [b for b in cached if b not in expected]
            held += expected
        elif move == 1 and cached:
            block_id = cached.pop(rng.randrange(len(cached)))
            free.take_cached([block_id])
            held.append(block_id)
        elif move == 2 and held:
            block_id = held.pop(rng.randrange(len(held)))
            free.release_plain(block_id)
            plain.append(block_id)
        elif move == 3 and held:
            block_ids = [held.pop(rng.randrange(len(held))) for _ in range(min(len(held), 2))]
            free.release_cached(block_ids)
            cached += block_ids
        assert len(free) == len(plain) + len(cached)
    assert list(free) == sorted(plain) + cached
