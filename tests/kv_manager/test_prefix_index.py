"""What every prefix index must do; one parameter per implementation."""

from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from kv_manager import prefix_index
from kv_manager.block import Blocks
from kv_manager.hash_chain import chain_digests, namespace_root
from kv_manager.prefix_index import HashPrefixIndex, PrefixIndex
from kv_manager.radix_index import RadixPrefixIndex

NewIndex = Callable[[Blocks], PrefixIndex]
ABC = np.array([[1, 2], [3, 4], [5, 6]], np.int32)


@pytest.fixture(
    params=[(HashPrefixIndex, 16), (HashPrefixIndex, 2), (RadixPrefixIndex, 16)], ids=["hash", "hash, in bulk", "radix"]
)
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
    index.insert(None, [0], [7], ABC[1:2], step=1)
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


def test_namespaces_are_trees_of_their_own(new_index: NewIndex, blocks: Blocks) -> None:
    index = new_index(blocks)
    roots = [namespace_root(name) for name in (b"", b"anna", b"bert")]
    for number, root in enumerate(roots):
        index.insert(root, [2 * number, 2 * number + 1], chain_digests(ABC[:2], root), ABC[:2], step=1)
    index.check_integrity()
    for number, root in enumerate(roots):
        assert index.longest_match(chain_digests(ABC, root), ABC, root) == [2 * number, 2 * number + 1]
    other = namespace_root(b"cecil")
    assert index.longest_match(chain_digests(ABC, other), ABC, other) == []
    mixed = index.longest_match(chain_digests(ABC, roots[1]), ABC, roots[2])
    assert not {2, 3} & set(mixed), "anna's digests alone do not lead to her blocks"


def test_prefixes_part_and_each_keeps_its_own_end(new_index: NewIndex) -> None:
    blocks = Blocks(32, 2)
    index = new_index(blocks)
    trunk = np.arange(20, dtype=np.int32).reshape(10, 2)
    branches = {}
    for number, common in enumerate((10, 7, 3, 0, 7)):
        rows = np.concatenate([trunk[:common], np.full((2, 2), 100 + number, np.int32)])
        digests = chain_digests(rows)
        found = index.longest_match(digests, rows)
        assert len(found) == (0 if number == 0 else common)
        fresh = [next_id for next_id in range(32) if not blocks.is_published[next_id]][: len(rows) - len(found)]
        parent = digests[len(found) - 1] if found else None
        index.insert(parent, fresh, digests[len(found) :], rows[len(found) :], step=1)
        index.check_integrity()
        branches[number] = (digests, rows, found + fresh)
    for digests, rows, block_ids in branches.values():
        assert index.longest_match(digests, rows) == block_ids
    for number in (1, 0, 4, 3, 2):
        digests, rows, block_ids = branches.pop(number)
        for block_id in reversed(block_ids):
            if not any(block_id in kept for _, _, kept in branches.values()):
                index.remove(block_id)
                index.check_integrity()
        for kept_digests, kept_rows, kept in branches.values():
            assert index.longest_match(kept_digests, kept_rows) == kept
    assert not any(blocks.is_published)


def test_a_prefix_comes_back_behind_which_blocks_are_left(new_index: NewIndex, blocks: Blocks) -> None:
    """No caller takes the head first, but nothing is hit beyond it then, and it fits in again."""
    index, digests = new_index(blocks), chain_digests(ABC)
    index.insert(None, [0, 1, 2], digests, ABC, step=1)
    index.remove(1)
    assert index.longest_match(digests, ABC) == [0]
    assert index.likely_match_len(digests) == 1
    index.insert(digests[0], [5], digests[1:2], ABC[1:2], step=2)
    index.check_integrity()
    assert index.longest_match(digests, ABC) == [0, 5, 2]


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)


@given(
    moves=st.lists(st.tuples(st.sampled_from(["publish", "publish", "remove"]), TOKENS, st.integers(0, 2)), max_size=40),
    num_digests=st.sampled_from([11, 1 << 64]),
)
def test_all_indexes_report_the_same_hits(moves: list[tuple[str, list[int], int]], num_digests: int) -> None:
    """Also where digests collide: what may be published is then told apart by digest, in the journal too."""
    roots = [None, namespace_root(b"anna"), namespace_root(b"bert")]
    pools = [Blocks(24, 1), Blocks(24, 1)]
    indexes: list[PrefixIndex] = [HashPrefixIndex(pools[0]), RadixPrefixIndex(pools[1])]
    free, tables = list(range(24)), []
    for move, tokens, tenant in moves:
        rows, digests = np.array(tokens, np.int32)[:, None], []
        for row in rows:
            digests.append(chain_digests(row[None], digests[-1] if digests else roots[tenant])[0] % num_digests)
        found = [index.longest_match(digests, rows, roots[tenant]) for index in indexes]
        assert len(found[0]) == len(found[1])
        assert indexes[0].likely_match_len(digests) == indexes[1].likely_match_len(digests) >= len(found[0])
        for pool, block_ids in zip(pools, found, strict=True):
            assert pool.token_ids[block_ids].tobytes() == rows[: len(block_ids)].tobytes()
        if move == "publish" and len(free) >= len(tokens):
            taken, free = free[: len(tokens)], free[len(tokens) :]
            counts = {index.insert(roots[tenant], taken, digests, rows, 1) for index in indexes}
            assert len(counts) == 1
            (count,) = counts
            tables.append(taken[:count])
            free += taken[count:]
        elif move == "remove" and tables:
            for block_id in reversed(tables.pop(tenant % len(tables))):
                for index in indexes:
                    index.remove(block_id)
                free.append(block_id)
        published = pools[0].published_ids().tolist()
        assert pools[0].published(published) == pools[1].published(published) and published == pools[1].published_ids().tolist()
        for index in indexes:
            index.check_integrity()
