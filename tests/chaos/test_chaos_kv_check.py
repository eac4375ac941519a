"""The comparison of cached KV with a fresh prefill finds a block that was adopted wrongly."""

import numpy as np
import pytest

from kv_manager.hash_chain import chain_digests
from kv_manager.published_block import PublishedBlock
from tests.chaos.kv_check import BLOCK_SIZE, FreshPrefill, KVVerdict, compare
from tests.chaos.setups import cpu, deterministic

SHARED = list(range(1000, 1000 + 2 * BLOCK_SIZE))
SEQUENCES = [SHARED + list(range(start, start + BLOCK_SIZE)) for start in (2000, 3000)]
"""Two prefixes of three blocks that share two."""


@pytest.fixture(scope="module", params=[deterministic, cpu], ids=["deterministic", "cpu"])
def prefill(request: pytest.FixtureRequest) -> FreshPrefill:
    return FreshPrefill(request.param(2))


def cached_and_held(prefill: FreshPrefill) -> tuple[dict[int, PublishedBlock], dict[int, np.ndarray]]:
    """Both sequences in blocks 0..3, and a second copy of the first block in block 4."""
    cached: dict[int, PublishedBlock] = {}
    held: dict[int, np.ndarray] = {}
    for token_ids, block_ids in zip(SEQUENCES, ([0, 1, 2], [4, 1, 3]), strict=True):
        rows = np.array(token_ids, np.int32).reshape(-1, BLOCK_SIZE)
        digests = chain_digests(rows)
        for index, (block_id, data) in enumerate(zip(block_ids, prefill.blocks(token_ids), strict=True)):
            parent = digests[index - 1] if index else None
            cached[block_id] = PublishedBlock(block_id, digests[index], parent, tuple(rows[index].tolist()), 7)
            held[block_id] = data.reshape(-1).copy()
    return cached, held


def test_right_blocks_agree(prefill: FreshPrefill) -> None:
    verdict = KVVerdict()
    compare("worker1", *cached_and_held(prefill), prefill, verdict)
    assert (verdict.blocks, verdict.mismatches) == (5, 0), verdict


def test_an_overwritten_block_is_found(prefill: FreshPrefill) -> None:
    cached, held = cached_and_held(prefill)
    held[3] = held[2]
    verdict = KVVerdict()
    compare("worker1", cached, held, prefill, verdict)
    assert verdict.mismatches == 1
    assert "block 3" in verdict.complaints[0]


def test_one_wrong_position_is_found(prefill: FreshPrefill) -> None:
    cached, held = cached_and_held(prefill)
    other = prefill.blocks([*SEQUENCES[0][:-1], 77])[2]
    held[2] = other.reshape(-1)
    verdict = KVVerdict()
    compare("worker1", cached, held, prefill, verdict)
    assert verdict.mismatches == 1


def test_a_block_without_its_prefix_is_found(prefill: FreshPrefill) -> None:
    cached, held = cached_and_held(prefill)
    del cached[1]
    verdict = KVVerdict()
    compare("worker1", cached, held, prefill, verdict)
    assert verdict.mismatches == 2
