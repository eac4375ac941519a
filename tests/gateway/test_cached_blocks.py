"""What changes of several workers' prefix caches come to for somebody who sees one."""

import random
from collections.abc import Sequence

import numpy as np

from gateway.cached_blocks import CachedBlocks, CacheEvent, Cleared, Removed, Stored
from tessera.values.kv_events import PoolChange

ROOT, TENANT = 7, 8

Told = tuple[int, int, int, bool]
"""Block id, digest, link before it, whether that is of a block."""


def change(*blocks: Told, removed: tuple[int, ...] = (), is_gone: bool = False, worker: str = "w") -> PoolChange:
    columns = np.array([block[:3] for block in blocks], np.int64).reshape(len(blocks), 3)
    digests, links = columns[:, 1].astype(np.uint64), columns[:, 2].astype(np.uint64)
    has_parent = np.array([block[3] for block in blocks], np.bool_)
    token_ids = np.repeat(columns[:, 1:2], 4, axis=1).astype(np.int32)
    return PoolChange(worker, ROOT, is_gone, np.array(removed, np.int64), columns[:, 0], digests, links, has_parent, token_ids)


FIRST, SECOND, THIRD = (0, 10, ROOT, False), (1, 11, 10, True), (2, 12, 11, True)


def digests(events: Sequence[CacheEvent]) -> list[list[int]]:
    return [[block.digest for block in event.blocks] for event in events if isinstance(event, Stored)]


def test_what_follows_each_other_is_told_in_one_in_whatever_order_it_comes() -> None:
    for seed in range(6):
        told = [FIRST, SECOND, THIRD]
        random.Random(seed).shuffle(told)
        assert digests(CachedBlocks().apply(change(*told))) == [[10, 11, 12]]


def test_parts_of_the_whole_wait_for_what_they_continue() -> None:
    cached = CachedBlocks()
    assert [digests(cached.fill(change(block))) for block in (THIRD, FIRST, SECOND)] == [[], [[10]], [[11, 12]]]
    cached.filled()
    assert digests(cached.whole()) == [[10, 11, 12]]


def test_what_continues_nothing_is_a_tenants_and_not_kept() -> None:
    cached = CachedBlocks()
    assert cached.apply(change((5, 50, TENANT, False), (6, 51, 50, True))) == []
    assert cached.apply(change(SECOND)) == []
    assert digests(cached.apply(change(FIRST))) == [[10]], "what came before it is not remembered"
    assert len(cached) == 1


def test_a_block_that_a_tenant_takes_over_is_gone() -> None:
    cached = CachedBlocks()
    cached.apply(change(FIRST, SECOND))
    assert cached.apply(change((1, 60, TENANT, False))) == [Removed((11,))]
    assert cached.apply(change((0, 61, 60, True))) == [Cleared()]


def test_a_copy_elsewhere_keeps_a_block() -> None:
    cached = CachedBlocks()
    cached.apply(change(FIRST, SECOND))
    assert cached.apply(change((4, *FIRST[1:]), worker="v")) == []
    assert cached.apply(change(FIRST)) == [], "told twice"
    assert cached.apply(change((3, *FIRST[1:]), removed=(0,))) == [], "moved within a pool"
    assert cached.apply(change(is_gone=True)) == [Removed((11,))]
    assert cached.apply(change(removed=(4, 99), worker="v")) == [Cleared()]
