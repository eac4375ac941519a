"""Any block size from 1 on: growth, hits and publishing by the same rules."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from kv_manager.allocation import PoolExhausted
from kv_manager.block_manager import BlockManager
from kv_manager.block_table import BlockTable

SIZES = st.integers(1, 40)


def filled(manager: BlockManager, token_ids: list[int], num_tokens: int) -> BlockTable:
    table = BlockTable()
    assert not isinstance(manager.allocate(table, manager.match(table, token_ids), num_tokens), PoolExhausted)
    return table


@given(block_size=SIZES, num_tokens=st.integers(2, 120), num_drafts=st.integers(0, 9))
def test_a_step_of_one_and_k_positions_needs_the_blocks_that_it_opens(
    block_size: int, num_tokens: int, num_drafts: int
) -> None:
    """It writes positions T-1 to T-1+k: each that is a multiple of B opens a block."""
    manager = BlockManager(200, block_size)
    table = filled(manager, list(range(num_tokens)), num_tokens - 1)
    opened = [position for position in range(num_tokens - 1, num_tokens + num_drafts) if position % block_size == 0]
    grown = manager.append(table, num_tokens + num_drafts)
    assert grown == table.block_ids[len(table.block_ids) - len(opened) :].tolist()
    assert len(table.block_ids) == -(-(num_tokens + num_drafts) // block_size)
    assert manager.append(table, num_tokens + num_drafts) == [], "growing again changes nothing"
    manager.check_integrity([table])


@given(block_size=SIZES, num_tokens=st.integers(1, 120), num_computed=st.integers(0, 120))
def test_exactly_the_full_computed_blocks_are_published(block_size: int, num_tokens: int, num_computed: int) -> None:
    manager, token_ids = BlockManager(200, block_size), list(range(num_tokens))
    table = filled(manager, token_ids, num_tokens)
    manager.publish(table, token_ids, min(num_computed, num_tokens), 1)
    num_full = min(num_computed, num_tokens) // block_size
    assert [list(entry.token_ids) for entry in manager.published()] == [
        token_ids[index * block_size : (index + 1) * block_size] for index in range(num_full)
    ]
    manager.check_integrity([table])


@given(block_size=SIZES, num_tokens=st.integers(1, 120), num_common=st.integers(0, 120))
def test_a_hit_is_the_common_prefix_in_whole_blocks_and_leaves_a_token(
    block_size: int, num_tokens: int, num_common: int
) -> None:
    manager, first = BlockManager(200, block_size), list(range(100))
    table = filled(manager, first, 100)
    manager.publish(table, first, 100, 1)
    other = [*first[:num_common], *range(1000, 1000 + num_tokens)][:num_tokens]
    common = min(num_common, num_tokens, 100)
    expected = min(common // block_size, (num_tokens - 1) // block_size) * block_size
    assert manager.match(BlockTable(), other).num_cached_tokens == expected
    assert manager.match(BlockTable(), np.array(other, np.int32)).num_cached_tokens == expected
    assert manager.likely_cached_len(BlockTable(), other) == expected


def test_with_blocks_of_one_token_all_but_the_last_are_hit() -> None:
    manager = BlockManager(20, 1)
    table = filled(manager, [1, 2, 3, 4], 4)
    manager.publish(table, [1, 2, 3, 4], 4, 1)
    assert manager.match(BlockTable(), [1, 2, 3, 4]).num_cached_tokens == 3
    assert manager.match(BlockTable(), [1, 2, 3, 4, 5]).num_cached_tokens == 4
    assert manager.match(BlockTable(), [1, 2, 9, 4, 5]).num_cached_tokens == 2
    assert manager.match(BlockTable(), [1]).num_cached_tokens == 0


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 1), (1, 0)])
def test_a_pool_without_blocks_or_tokens_is_our_bug(num_blocks: int, block_size: int) -> None:
    with pytest.raises(AssertionError, match="a pool needs blocks and tokens"):
        BlockManager(num_blocks, block_size)
