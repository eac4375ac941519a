"""What every prefix index must do; one parameter per implementation."""

from collections.abc import Callable

import numpy as np
import pytest

from kv_manager import prefix_index
from kv_manager.block import Blocks
from kv_manager.hash_chain import chain_digests
from kv_manager.prefix_index import HashPrefixIndex, PrefixIndex

NewIndex = Callable[[Blocks], PrefixIndex]
ABC = np.array([[1, 2], [3, 4], [5, 6]], np.int32)


@pytest.fixture(params=[(HashPrefixIndex, 16), (HashPrefixIndex, 2)], ids=["hash", "hash, in bulk"])
def new_index(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> NewIndex:
    kind, bulk_blocks = request.param
    monkeypatch.setattr(prefix_index, "BULK_BLOCKS", bulk_blocks)
    chosen: NewIndex = kind
    return chosen


@pytest.fixture
def blocks() -> Blocks:
    return Blocks(num_blocks=8, block_size=2)


def test_an_empty_index_matches_nothing(new_index: NewIndex, blocks: Blocks) -> None:
    assert new_index(blocks).longest_match(chain_digests(ABC), ABC) == []


def test_the_longest_published_prefix_is_found(new_index: NewIndex, blocks: Blocks) -> None:
    index, digests = new_index(blocks), chain_digests(ABC)
    assert index.insert(None, [4, 2], digests[:2], ABC[:2], step=1) == 2
    index.check_integrity()
    assert index.longest_match(digests, ABC) == [4, 2]
    assert index.longest_match(digests[:1], ABC[:1]) == [4]
    other = np.array([[1, 2], [9, 9]], np.int32)
    assert index.longest_match(chain_digests(other), other) == [4]


def test_an_inserted_block_carries_its_entry(new_index: NewIndex, blocks: Blocks) -> None:
    index, digests = new_index(blocks), chain_digests(ABC)
    index.insert(None, [4], digests[:1], ABC[:1], step=1)
    index.insert(digests[0], [2], digests[1:2], ABC[1:2], step=5)
    (entry,) = blocks.published([2])
    assert (entry.digest, entry.parent, entry.token_ids, entry.published_step) == (digests[1], digests[0], (3, 4), 5)


def test_a_middle_block_is_hit_only_behind_its_own_prefix(new_index: NewIndex, blocks: Blocks) -> None:
    index = new_index(blocks)
    index.insert(None, [0, 1], chain_digests(ABC[:2]), ABC[:2], step=1)
    moved = ABC[1:2]
    assert index.longest_match(chain_digests(moved), moved) == []


def test_a_removed_block_is_gone_and_its_prefix_stays(new_index: NewIndex, blocks: Blocks) -> None:
    index, digests = new_index(blocks), chain_digests(ABC)
    index.insert(None, [0, 1, 2], digests, ABC, step=1)
    index.remove(2)
    index.check_integrity()
    assert index.longest_match(digests, ABC) == [0, 1]
    assert not blocks.is_published[2]


def test_several_blocks_under_one_digest_serve_until_the_last_is_gone(new_index: NewIndex, blocks: Blocks) -> None:
    index, digests = new_index(blocks), chain_digests(ABC[:1])
    for block_id in (3, 5, 6):
        assert index.insert(None, [block_id], digests, ABC[:1], step=1) == 1
    left = {3, 5, 6}
    for block_id in (5, 3, 6):
        index.check_integrity()
        (hit,) = index.longest_match(digests, ABC[:1])
        assert hit in left
        index.remove(block_id)
        left.remove(block_id)
    index.check_integrity()
    assert index.longest_match(digests, ABC[:1]) == []


def test_a_digest_of_other_content_is_refused_from_that_block_on(new_index: NewIndex, blocks: Blocks) -> None:
    index = new_index(blocks)
    index.insert(None, [0], [7], ABC[:1], step=1)
    assert index.insert(None, [1, 2, 3], [8, 7, 9], ABC, step=1) == 1
    index.check_integrity()
    assert [bool(blocks.is_published[block_id]) for block_id in (1, 2, 3)] == [True, False, False]


def test_equal_tokens_behind_another_prefix_are_other_content(new_index: NewIndex, blocks: Blocks) -> None:
    index = new_index(blocks)
    index.insert(None, [0, 1], [10, 7], ABC[:2], step=1)
    index.insert(None, [2], [11], ABC[2:], step=1)
    assert index.insert(11, [3], [7], ABC[1:2], step=1) == 0
    assert index.longest_match([11, 7], np.array([ABC[2], ABC[1]])) == [2]


def test_a_match_compares_token_ids(new_index: NewIndex, blocks: Blocks) -> None:
    index = new_index(blocks)
    index.insert(None, [0, 1], [7, 8], ABC[:2], step=1)
    assert index.longest_match([7, 8], np.array([[1, 2], [3, 5]], np.int32)) == [0]
    assert index.longest_match([7, 8], np.array([[0, 2], [3, 4]], np.int32)) == []


def test_removing_what_is_not_published_is_our_bug(new_index: NewIndex, blocks: Blocks) -> None:
    with pytest.raises(AssertionError, match="block 3 is not published"):
        new_index(blocks).remove(3)


def test_the_check_finds_a_hash_without_an_entry(new_index: NewIndex, blocks: Blocks) -> None:
    index = new_index(blocks)
    index.insert(None, [0], [7], ABC[:1], step=1)
    blocks.is_published[1] = True
    with pytest.raises(AssertionError, match="index and columns differ"):
        index.check_integrity()


def test_the_check_finds_a_block_that_outlived_its_prefix(new_index: NewIndex, blocks: Blocks) -> None:
    index, digests = new_index(blocks), chain_digests(ABC)
    index.insert(None, [0, 1], digests[:2], ABC[:2], step=1)
    index.remove(0)
    with pytest.raises(AssertionError, match="outlived its prefix"):
        index.check_integrity()


@pytest.mark.parametrize("published", [0, 7, 19], ids=["from the first block", "from the middle", "all but the last"])
def test_many_blocks_at_once_are_as_many_one_by_one(new_index: NewIndex, published: int) -> None:
    ids = np.arange(40, dtype=np.int32).reshape(20, 2)
    digests, block_ids = chain_digests(ids), list(range(30, 50))
    pools = Blocks(64, 2), Blocks(64, 2)
    together, singly = new_index(pools[0]), new_index(pools[1])
    for row in range(20):
        parent = digests[row - 1] if row else None
        singly.insert(parent, [block_ids[row]], digests[row : row + 1], ids[row : row + 1], step=1 if row < published else 2)
    if published:
        together.insert(None, block_ids[:published], digests[:published], ids[:published], step=1)
    assert together.insert(None, block_ids, digests, ids, step=2) == 20
    twin = list(range(20))
    assert together.insert(None, twin, digests, ids, step=3) == 20, "the same content again"
    for index in (together, singly):
        index.check_integrity()
    assert pools[0].published(block_ids) == pools[1].published(block_ids)
    assert together.longest_match(digests, ids) == block_ids
