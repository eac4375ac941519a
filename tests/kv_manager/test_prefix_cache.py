"""Hashing prompts that begin alike, and telling the journal what has changed."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kv_manager.block import Blocks
from kv_manager.block_table import BlockTable
from kv_manager.hash_chain import chain_digests, namespace_root
from kv_manager.prefix_cache import PrefixCache

BLOCK_SIZE = 2
PROMPTS = st.lists(
    st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=12), st.sampled_from([b"", b"anna"])), max_size=12
)


@given(PROMPTS)
def test_digests_are_those_of_the_whole_chain_however_prompts_before_began(prompts: list[tuple[list[int], bytes]]) -> None:
    """Few ids, so that many begin alike; a table's own namespace begins another chain."""
    cache = PrefixCache(Blocks(8, BLOCK_SIZE), b"weights", is_enabled=True)
    for prompt, namespace in prompts:
        table = BlockTable(namespace=namespace)
        assert cache.likely_match_len(table, np.array(prompt, np.int32)) == 0
        num_full = len(prompt) // BLOCK_SIZE
        rows = np.array(prompt[: num_full * BLOCK_SIZE], np.int32).reshape(num_full, BLOCK_SIZE)
        expected = chain_digests(rows, namespace_root(b"weights" + namespace)) if len(prompt) > BLOCK_SIZE else []
        assert table.digests.tolist() == expected


def test_a_chain_that_is_reused_is_not_the_other_tables() -> None:
    """What one table learns beyond the shared beginning is its own."""
    cache = PrefixCache(Blocks(8, BLOCK_SIZE), b"", is_enabled=True)
    tables = [BlockTable() for _ in range(3)]
    for table, prompt in zip(tables, ([1, 2, 3, 4, 9], [1, 2, 3, 4, 5, 6, 9], [1, 2, 7]), strict=True):
        cache.likely_match_len(table, np.array(prompt, np.int32))
    assert [len(table.digests) for table in tables] == [2, 3, 1]
    assert tables[1].digests[:2] == tables[0].digests and tables[2].digests == tables[0].digests[:1]
    del tables[1].digests[1:]
    assert len(tables[0].digests) == 2


def test_nothing_changed_is_nothing_to_tell() -> None:
    cache = PrefixCache(Blocks(8, BLOCK_SIZE), b"", is_enabled=True)
    changes = cache.take_changes()
    assert not changes.published and not changes.unpublished
