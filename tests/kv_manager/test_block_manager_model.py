"""Random lives of a block pool: every move of the manager, in any order, against a worker that remembers what it wrote."""

import random
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from block_pool import Pool, Sequence, random_moves
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from kv_manager import prefix_cache
from kv_manager.block_manager import PREFIX_INDEXES, BlockManager
from kv_manager.block_table import BlockTable
from kv_manager.hash_chain import chain_digests

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
INDEX = st.integers(0, 1_000)
POSITION = st.integers(0, 30)


class BlockPoolMachine(RuleBasedStateMachine):
    """Two token ids, so that prefixes meet all the time; a pool so small that it is mostly full."""

    pool: Pool | None = None

    @initialize(
        num_blocks=st.integers(1, 12),
        block_size=st.sampled_from([1, 2, 3, 4]),
        num_host_blocks=st.sampled_from([0, 2, 8, 8]),
        secure_zero=st.booleans(),
        caching=st.sampled_from([True, True, True, False]),
        prefix_index=st.sampled_from(list(PREFIX_INDEXES)),
    )
    def start(self, num_blocks: int, block_size: int, num_host_blocks: int, caching: bool, **options: Any) -> None:
        self.pool = Pool(num_blocks, block_size, num_host_blocks, enable_prefix_caching=caching, **options)

    @rule(token_ids=PROMPTS, tenant=st.sampled_from([0, 0, 1, 2]), num_ahead=st.integers(0, 3), is_computed=st.booleans())
    def submit(self, token_ids: list[int], tenant: int, num_ahead: int, is_computed: bool) -> None:
        sequence = Sequence(token_ids, tenant)
        self.pool.admit(sequence, num_ahead)
        if is_computed and sequence.table.block_ids:
            self.pool.compute(sequence, len(token_ids))

    @precondition(lambda self: self.pool.waiting)
    @rule(index=INDEX, num_tokens=st.integers(0, 9))
    def resume(self, index: int, num_tokens: int) -> None:
        sequence = self.pool.waiting.pop(index % len(self.pool.waiting))
        self.pool.admit(sequence, 1)
        if num_tokens and sequence.table.block_ids:
            self.pool.compute(sequence, num_tokens)

    @precondition(lambda self: self.pool.running)
    @rule(index=INDEX, num_tokens=st.integers(1, 9))
    def compute(self, index: int, num_tokens: int) -> None:
        self.pool.compute(self._running(index), num_tokens)

    @precondition(lambda self: self.pool.running)
    @rule(index=INDEX, drafts=st.lists(st.integers(0, 1), max_size=3), num_accepted=st.integers(0, 3))
    def decode(self, index: int, drafts: list[int], num_accepted: int) -> None:
        sequence = self._running(index)
        if sequence.num_computed >= len(sequence.token_ids) - 1:
            self.pool.decode(sequence, drafts, min(num_accepted, len(drafts)))

    @precondition(lambda self: self.pool.running)
    @rule(index=INDEX, position=POSITION, num_ahead=st.integers(0, 3))
    def fork(self, index: int, position: int, num_ahead: int) -> None:
        sequence = self._running(index)
        self.pool.fork(sequence, min(position, sequence.num_computed), num_ahead)

    @precondition(lambda self: self.pool.running)
    @rule(index=INDEX, position=POSITION, token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def rewrite(self, index: int, position: int, token_ids: list[int]) -> None:
        sequence = self._running(index)
        self.pool.rewrite(sequence, min(position, sequence.num_computed), token_ids)

    @precondition(lambda self: self.pool.running)
    @rule(index=INDEX)
    def swap_out(self, index: int) -> None:
        self.pool.swap_out(self._running(index))

    @precondition(lambda self: self.pool.swapped)
    @rule(index=INDEX, num_ahead=st.integers(0, 3), ends=st.sampled_from([False, False, True]))
    def leave_the_host(self, index: int, num_ahead: int, ends: bool) -> None:
        sequence = self.pool.swapped[index % len(self.pool.swapped)]
        if ends:
            self.pool.finish(sequence)
        else:
            self.pool.swap_in(sequence, num_ahead)

    @precondition(lambda self: self.pool.running)
    @rule(index=INDEX, will_be_back=st.booleans())
    def leave(self, index: int, will_be_back: bool) -> None:
        sequence = self._running(index)
        (self.pool.preempt if will_be_back else self.pool.finish)(sequence)

    @rule(move=st.sampled_from(["flush"] * 3 + ["write_journal"] * 3 + ["restart"] * 2 + ["reset"]))
    def nobodys_move(self, move: str) -> None:
        getattr(self.pool, move)()

    @invariant()
    def sound(self) -> None:
        if self.pool is not None:
            self.pool.check()

    def teardown(self) -> None:
        if self.pool is not None:
            self.pool.end()

    def _running(self, index: int) -> Sequence:
        return self.pool.running[index % len(self.pool.running)]


# Without shrinking, which can outlast the time limit of a test and then shows nothing at all.
SETTINGS = settings(
    max_examples=100,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
BlockPoolMachine.TestCase.settings = SETTINGS
TestBlockPool = BlockPoolMachine.TestCase


def weak_chain(rows: np.ndarray, parent: int | None = None) -> list[int]:
    """Nine digests for everything."""
    digests = []
    for row in rows:
        parent = chain_digests(row[None], parent)[0] % 9
        digests.append(parent)
    return digests


@pytest.mark.parametrize(
    ("seed", "count", "prefix_index"),
    [(0, 10_000, "hash"), (1, 10_000, "hash"), (2, 4_000, "hash"), (0, 4_000, "radix"), (1, 4_000, "radix")],
)
def test_thousands_of_random_moves(seed: int, count: int, prefix_index: str) -> None:
    """Seed 0 evicted a prefix before the block behind it, which a copy still held; seed 1 zeroed a block that was yet to be copied."""
    rng = random.Random(seed)
    num_blocks, block_size = ((24, 2), (24, 4), (40, 1))[seed]
    pool = Pool(num_blocks, block_size, num_host_blocks=12, secure_zero=seed == 1, prefix_index=prefix_index)
    random_moves(rng, pool, count)
    pool.end()
    assert pool.step > count // 10, "too few moves computed anything"
    assert min(pool.counts.values()) >= 5, f"too few of some move: {pool.counts}"


@pytest.mark.parametrize(("prefix_index", "count"), [("hash", 16_000), ("radix", 4_000)])
def test_hits_are_exact_however_digests_collide(prefix_index: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool caches less, and still never gives a sequence the KV of another prefix.

    Without restarts: an entry from the journal knows its prefix by the digest alone.
    """
    monkeypatch.setattr(prefix_cache, "chain_digests", weak_chain)
    pool = Pool(num_blocks=24, block_size=2, num_host_blocks=8, digests_collide=True, prefix_index=prefix_index)
    random_moves(random.Random(0), pool, count, restarts=False)
    assert pool.manager.stats.hit_tokens > count // 55, "too few hits to show anything"


def leak_a_shared_block(manager: BlockManager, table: BlockTable, free: Callable[..., None]) -> None:
    """As one engine did: whoever goes while others share its blocks does not take its reference along."""
    if table.block_ids and manager._blocks.ref_counts[table.block_ids[0]] > 1:
        table.block_ids = table.block_ids[1:]
    free(manager, table)


def keep_host_blocks(manager: BlockManager, table: BlockTable, free: Callable[..., None]) -> None:
    table.host_block_ids = ()
    free(manager, table)


@pytest.mark.parametrize("plant", [leak_a_shared_block, keep_host_blocks])
def test_a_planted_leak_is_found_at_once(plant: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the usual examples are enough; they take a second or two."""
    free = BlockManager.free
    monkeypatch.setattr(BlockManager, "free", lambda manager, table: plant(manager, table, free))
    few: Any = settings(SETTINGS, max_examples=SETTINGS.max_examples // 2)
    with pytest.raises(AssertionError, match=r"reference counts differ|host blocks are lost"):
        run_state_machine_as_test(BlockPoolMachine, settings=few)
