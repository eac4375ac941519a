"""The journal's map of cached blocks against a plain dictionary."""

import random

import pytest

from kv_manager.published_block import PublishedBlock
from kv_manager.published_blocks import NO_BLOCKS, PublishedBlocks
from services.scheduler.core.block_map import PAGE_BLOCKS, BlockMap


def block(rng: random.Random, block_id: int, size: int = 4) -> PublishedBlock:
    parent = rng.choice((None, 0, rng.randrange(2**64)))
    return PublishedBlock(
        block_id, rng.randrange(2**64), parent, tuple(rng.randrange(2**31) for _ in range(size)), rng.randrange(2**40)
    )


@pytest.mark.parametrize("seed", range(20))
def test_it_holds_what_a_dictionary_would(seed: int) -> None:
    rng = random.Random(seed)
    blocks, expected = BlockMap(), dict[int, PublishedBlock]()
    for _ in range(60):
        changes = []
        for _ in range(rng.choice((1, 1, 2, 30))):
            gone = tuple(rng.sample(range(3000), rng.randrange(5)))
            new = [block(rng, block_id) for block_id in rng.sample(range(3000 if rng.random() < 0.3 else 40), rng.randrange(5))]
            changes.append((PublishedBlocks.of(new), gone))
            for block_id in gone:
                expected.pop(block_id, None)
            expected.update((entry.block_id, entry) for entry in new)
        blocks.apply_all(changes)
        assert blocks == expected and len(blocks) == len(expected)
        assert list(blocks) == sorted(expected) == [entry.block_id for entry in blocks.values()]
        pages = {index: list(blocks.page(index)) for index in blocks.page_indices()}
        assert [entry for entries in pages.values() for entry in entries] == list(blocks.values())
        assert all(entry.block_id // PAGE_BLOCKS == index for index, entries in pages.items() for entry in entries)


def test_of_one_block_told_twice_at_once_the_later_stays() -> None:
    rng, blocks = random.Random(1), BlockMap()
    first, second = block(rng, 7), block(rng, 7)
    blocks.apply(PublishedBlocks.of([first, second]), ())
    assert blocks == {7: second}
    blocks.apply(PublishedBlocks.of([first]), (7,))
    assert blocks == {7: first}, "what goes goes before what comes"


def test_an_empty_map_can_change_its_block_size() -> None:
    rng, blocks = random.Random(1), BlockMap()
    blocks.apply(PublishedBlocks.of([block(rng, 1, 4)]), ())
    blocks.apply(NO_BLOCKS, (1, 2000))
    large = block(rng, 1500, 16)
    blocks.apply(PublishedBlocks.of([large]), ())
    assert blocks == {1500: large} and blocks != {} and blocks != BlockMap()


def test_a_page_that_nobody_wrote_is_empty() -> None:
    assert len(BlockMap().page(0)) == len(BlockMap().page(10**6)) == 0


def test_touched_pages_are_those_of_all_blocks() -> None:
    rng = random.Random(1)
    published = PublishedBlocks.of([block(rng, 0), block(rng, PAGE_BLOCKS)])
    assert BlockMap().apply_all([(published, ()), (NO_BLOCKS, (PAGE_BLOCKS - 1, 5 * PAGE_BLOCKS))]) == [0, 1, 5]
    assert BlockMap().apply_all([(NO_BLOCKS, ())]) == []
