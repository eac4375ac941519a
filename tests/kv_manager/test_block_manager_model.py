"""Random lives of a block pool beside a worker that remembers what it really wrote.

The worker keeps, per block and offset, the whole prefix whose KV is there. So a hit is right iff the block holds the KV of the
sequence's own prefix, and a published entry is right iff its block holds the KV of the prefix it stands for. A restart rebuilds
the manager from the tables and from a journal that may be behind.
"""

import random
from dataclasses import dataclass, field

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kv_manager import prefix_cache
from kv_manager.block_manager import BlockManager, PoolExhausted
from kv_manager.block_table import BlockTable, HeldTable
from kv_manager.hash_chain import chain_digests
from kv_manager.prefix_cache import BlockChanges
from kv_manager.published_block import PublishedBlock

Prefix = tuple[int, ...]


@dataclass
class Sequence:
    token_ids: list[int]
    table: BlockTable = field(default_factory=BlockTable)
    num_computed: int = 0
    admitted_before: bool = False


class Pool:
    """Manager, worker and journal, with the invariants that join them."""

    def __init__(self, num_blocks: int, block_size: int, digests_collide: bool = False) -> None:
        self.digests_collide = digests_collide
        self.manager = BlockManager(num_blocks, block_size)
        self.kv: list[list[Prefix | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.last_write_steps = [0] * num_blocks
        self.step = 0
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.journal: dict[int, PublishedBlock] = {}
        self.cached_prefixes: dict[int, Prefix] = {}  # by block: what was published and not handed out since

    def admit(self, sequence: Sequence, num_ahead: int) -> None:
        """Admit with room for `num_ahead` positions more, or check that the refusal was due."""
        manager, size = self.manager, self.manager.block_size
        num_tokens = len(sequence.token_ids) + num_ahead
        match = manager.match(sequence.table, sequence.token_ids)
        assert match.num_cached_tokens == self._longest_cached(sequence.token_ids)
        for position in range(match.num_cached_tokens):
            written = self.kv[match.block_ids[position // size]][position % size]
            assert written == tuple(sequence.token_ids[: position + 1]), "a hit on KV of another prefix"
        needed, free = manager.blocks_needed(match, num_tokens), manager.num_free_blocks
        outcome = manager.allocate(sequence.table, match, num_tokens, resumed=sequence.admitted_before)
        if isinstance(outcome, PoolExhausted):
            assert outcome == PoolExhausted(needed, free) and needed > free
            self.waiting.append(sequence)
            return
        assert manager.num_free_blocks == free - needed
        assert len(sequence.table.block_ids) * size >= num_tokens
        self._handed_out(outcome)
        sequence.num_computed = match.num_cached_tokens
        sequence.admitted_before = True
        self.running.append(sequence)

    def compute(self, sequence: Sequence, num_tokens: int) -> None:
        """One step over the next `num_tokens` committed positions."""
        self.step += 1
        covered = len(sequence.table.block_ids) * self.manager.block_size
        self._advance(sequence, min(sequence.num_computed + num_tokens, len(sequence.token_ids), covered))

    def decode(self, sequence: Sequence, drafts: list[int], num_accepted: int) -> None:
        """One step of a decoding sequence: its last token and drafts are written, some accepted, and one token sampled."""
        outcome = self.manager.append(sequence.table, len(sequence.token_ids) + len(drafts))
        if isinstance(outcome, PoolExhausted):
            assert outcome.needed > outcome.free == self.manager.num_free_blocks
            self.preempt(sequence)
            return
        self._handed_out(outcome)
        self.step += 1
        num_committed = len(sequence.token_ids)
        with_drafts = sequence.token_ids + drafts
        for position in range(num_committed, len(with_drafts)):
            self._write(sequence, position, tuple(with_drafts[: position + 1]))
        sequence.token_ids = [*with_drafts[: num_committed + num_accepted], 3]
        self._advance(sequence, num_committed + num_accepted)

    def preempt(self, sequence: Sequence) -> None:
        self.finish(sequence)
        sequence.num_computed = 0
        self.waiting.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.manager.free(sequence.table)

    def write_journal(self) -> None:
        changes = self.manager.take_changes()
        for block_id in changes.unpublished:
            self.journal.pop(block_id, None)
        self.journal.update({entry.block_id: entry for entry in changes.published})
        assert self.journal == {entry.block_id: entry for entry in self.manager.published()}

    def restart(self) -> None:
        """A new manager from what the worker holds and what the journal tells; nothing computed is lost if it was up to date."""
        old, up_to_date = self.manager, not self.manager._cache._changed
        self.manager = BlockManager(old.num_blocks, old.block_size)
        entries = [e for e in self.journal.values() if self.last_write_steps[e.block_id] <= e.published_step]
        held = []
        for sequence in self.running:
            sequence.table = BlockTable(block_ids=sequence.table.block_ids)
            held.append(HeldTable(sequence.table, sequence.token_ids, sequence.num_computed))
        told = self.manager.adopt(held, entries, self.step)
        assert sorted(told, key=lambda entry: entry.block_id) == list(self.manager.published())
        if up_to_date:
            assert self.manager.published() == old.published()
            assert self.manager.num_free_blocks == old.num_free_blocks
            assert self.manager.take_changes() == BlockChanges((), ())
        self.journal = {entry.block_id: entry for entry in entries}
        self.write_journal()
        self.cached_prefixes = self._published_prefixes()

    def check(self) -> None:
        self.manager.check_integrity([sequence.table for sequence in self.running])
        size = self.manager.block_size
        for block_id, prefix in self._published_prefixes().items():
            start = len(prefix) - size
            assert self.kv[block_id] == [prefix[: start + offset + 1] for offset in range(size)], (
                "an entry for KV that is not there"
            )
        assert self._published_prefixes() == self.cached_prefixes
        for sequence in self.running:
            for position in range(sequence.num_computed):
                written = self.kv[sequence.table.block_ids[position // size]][position % size]
                assert written == tuple(sequence.token_ids[: position + 1]), "somebody wrote over a sequence's KV"

    def _advance(self, sequence: Sequence, stop: int) -> None:
        """Write committed positions up to `stop`, and publish what became full."""
        for position in range(sequence.num_computed, stop):
            self._write(sequence, position, tuple(sequence.token_ids[: position + 1]))
        sequence.num_computed = stop
        self.manager.publish(sequence.table, sequence.token_ids, stop, self.step)
        size = self.manager.block_size
        assert sequence.table.num_published == stop // size or self.digests_collide
        for index in range(sequence.table.num_published):
            self.cached_prefixes[sequence.table.block_ids[index]] = tuple(sequence.token_ids[: (index + 1) * size])

    def _write(self, sequence: Sequence, position: int, prefix: Prefix) -> None:
        size = self.manager.block_size
        block_id = sequence.table.block_ids[position // size]
        self.kv[block_id][position % size] = prefix
        self.last_write_steps[block_id] = self.step

    def _handed_out(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            self.cached_prefixes.pop(block_id, None)

    def _longest_cached(self, token_ids: list[int]) -> int:
        size, cached, length = self.manager.block_size, set(self.cached_prefixes.values()), 0
        while length + size < len(token_ids) and tuple(token_ids[: length + size]) in cached:
            length += size
        return length

    def _published_prefixes(self) -> dict[int, Prefix]:
        entries = self.manager.published()
        by_digest = {entry.digest: entry for entry in entries}

        def prefix(entry: PublishedBlock) -> Prefix:
            return (prefix(by_digest[entry.parent]) if entry.parent is not None else ()) + entry.token_ids

        return {entry.block_id: prefix(entry) for entry in entries}


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
INDEX = st.integers(0, 1_000)


class BlockPoolMachine(RuleBasedStateMachine):
    """Two token ids, so that prefixes meet all the time; a pool so small that it is mostly full."""

    @initialize(num_blocks=st.integers(1, 9), block_size=st.sampled_from([1, 2, 3, 4]))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.pool = Pool(num_blocks, block_size)

    @rule(token_ids=PROMPTS, num_ahead=st.integers(0, 3))
    def submit(self, token_ids: list[int], num_ahead: int) -> None:
        self.pool.admit(Sequence(token_ids), num_ahead)

    @precondition(lambda self: self.pool.waiting)
    @rule(index=INDEX)
    def resume(self, index: int) -> None:
        self.pool.admit(self.pool.waiting.pop(index % len(self.pool.waiting)), 1)

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
    @rule(index=INDEX)
    def preempt(self, index: int) -> None:
        self.pool.preempt(self._running(index))

    @precondition(lambda self: self.pool.running)
    @rule(index=INDEX)
    def finish(self, index: int) -> None:
        self.pool.finish(self._running(index))

    @rule()
    def write_journal(self) -> None:
        self.pool.write_journal()

    @rule()
    def restart(self) -> None:
        self.pool.restart()

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check()

    def teardown(self) -> None:
        """Everything can be freed, and then everything is free."""
        if hasattr(self, "pool"):
            for sequence in list(self.pool.running):
                self.pool.finish(sequence)
            self.pool.check()
            assert self.pool.manager.num_free_blocks == self.pool.manager.num_blocks

    def _running(self, index: int) -> Sequence:
        return self.pool.running[index % len(self.pool.running)]


# Without shrinking, which can outlast the time limit of a test and then shows nothing at all.
BlockPoolMachine.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
TestBlockPool = BlockPoolMachine.TestCase


def random_moves(rng: random.Random, pool: Pool, count: int, restarts: bool) -> None:
    """Drive a pool with mostly short prompts of two token ids, and check it after every move."""
    for _ in range(count):
        move = rng.random()
        if move < 0.2 and len(pool.waiting) < 8:
            pool.admit(Sequence([rng.randrange(2) for _ in range(rng.randint(1, 24))]), rng.randrange(3))
        elif move < 0.3 and pool.waiting:
            pool.admit(pool.waiting.pop(rng.randrange(len(pool.waiting))), 1)
        elif move < 0.31 and restarts:
            pool.restart()
        elif move < 0.4:
            pool.write_journal()
        elif pool.running:
            sequence = rng.choice(pool.running)
            if len(sequence.token_ids) > 60 or move < 0.5:
                pool.finish(sequence)
            elif move < 0.55:
                pool.preempt(sequence)
            elif sequence.num_computed < len(sequence.token_ids) - 1:
                pool.compute(sequence, rng.randint(1, 12))
            else:
                drafts = [rng.randrange(2) for _ in range(rng.randrange(4))]
                pool.decode(sequence, drafts, rng.randint(0, len(drafts)))
        pool.check()


@pytest.mark.parametrize("seed", range(2))
def test_ten_thousand_random_moves(seed: int) -> None:
    rng = random.Random(seed)
    pool = Pool(num_blocks=24, block_size=rng.choice([2, 4]))
    random_moves(rng, pool, 10_000, restarts=True)
    assert pool.step > 1000, "too few moves computed anything"


def test_hits_are_exact_however_digests_collide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine digests for everything: the pool caches less, and still never gives a sequence the KV of another prefix.

    Without restarts: an entry from the journal knows its prefix by the digest alone.
    """

    def weak_chain(rows: np.ndarray, parent: int | None = None) -> list[int]:
        digests = []
        for row in rows:
            parent = chain_digests(row[None], parent)[0] % 9
            digests.append(parent)
        return digests

    monkeypatch.setattr(prefix_cache, "chain_digests", weak_chain)
    pool = Pool(num_blocks=24, block_size=2, digests_collide=True)
    random_moves(random.Random(0), pool, 4_000, restarts=False)
    assert pool.manager.stats.hit_tokens > 300, "too few hits to show anything"
