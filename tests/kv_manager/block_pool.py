"""A block pool beside a worker that remembers what it really wrote, for random lives of both.

The worker keeps one mark for each position of its memory: that of the whole prefix, and of the tenant, whose KV is there. So a hit is
right iff the block holds the marks of the sequence's own prefix, and a published entry iff its block holds those of the prefix it stands
for. What the manager wants moved waits, as in a scheduler, for the next batch, which moves it in the order of the contract. A
restart rebuilds the manager from the tables and from a journal that may be behind.
"""

import random
from dataclasses import dataclass, field
from typing import Any

from kv_manager.allocation import BlockPairs, PoolExhausted
from kv_manager.block_manager import BlockManager
from kv_manager.block_table import BlockTable, HeldTable
from kv_manager.hash_chain import join_namespace, namespace_link
from kv_manager.host_pool import HostPoolExhausted
from kv_manager.prefix_cache import BlockChanges
from kv_manager.published_block import PublishedBlock

POOL_NAMESPACE = b"weights"
NAMESPACES = (b"", join_namespace("anna"), join_namespace("bert"))
UNKNOWN = 4
"""What a worker's memory holds before anybody wrote it: a mark of no tenant, and not zero."""


def next_mark(mark: int, token_id: int) -> int:
    """Mark of a prefix with one more token; the lowest two bits are the tenant's number (1 to 3), as in `mark`."""
    return (hash((mark, token_id)) & ~3) | (mark & 3)


@dataclass(eq=False)
class Sequence:
    """`marks[i]` is the mark of the first i + 1 tokens, as far as it has been needed. `is_moving`: its KV is where it belongs only after the
    next batch."""

    token_ids: list[int]
    tenant: int = 0
    table: BlockTable = field(default_factory=BlockTable)
    num_computed: int = 0
    admitted_before: bool = False
    is_moving: bool = False
    marks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.table.namespace = NAMESPACES[self.tenant]

    def marks_of(self, first: int, stop: int) -> list[int]:
        for token_id in self.token_ids[len(self.marks) : stop]:
            self.marks.append(next_mark(self.marks[-1] if self.marks else self.tenant + 1, token_id))
        return self.marks[first:stop]

    def replace_from(self, position: int, token_ids: list[int]) -> None:
        self.token_ids = self.token_ids[:position] + token_ids
        del self.marks[position:]


class Pool:
    """Manager, worker and journal, with the invariants that join them."""

    def __init__(
        self, num_blocks: int, block_size: int, num_host_blocks: int = 0, digests_collide: bool = False, **options: Any
    ) -> None:
        self.options = {"namespace": POOL_NAMESPACE, "num_host_blocks": num_host_blocks, **options}
        self.digests_collide = digests_collide
        self.manager = BlockManager(num_blocks, block_size, **self.options)
        self.kv = [[UNKNOWN] * block_size for _ in range(num_blocks)]
        self.host_kv = [[UNKNOWN] * block_size for _ in range(num_host_blocks)]
        self.last_write_steps = [0] * num_blocks
        self.step = 0
        self.running: list[Sequence] = []
        self.swapped: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.moves: dict[str, list[tuple[Sequence, BlockPairs]]] = {"out": [], "copy": [], "in": []}
        self.journal: dict[int, PublishedBlock] = {}
        self.cached: dict[int, int] = {}  # by block the last mark of what was published and not handed out since
        self.links = {namespace_link(POOL_NAMESPACE + name): tenant for tenant, name in enumerate(NAMESPACES)}
        self.counts = dict.fromkeys(("fork", "copy_on_write", "swap_out", "swap_in", "reset", "hit", "restart"), 0)

    # -- what a scheduler does

    def admit(self, sequence: Sequence, num_ahead: int) -> None:
        """Admit with room for `num_ahead` positions more, or check that the refusal was due."""
        manager = self.manager
        num_tokens = len(sequence.token_ids) + num_ahead
        match = manager.match(sequence.table, sequence.token_ids)
        self._check_hit(sequence, match.block_ids, len(sequence.token_ids))
        needed, free = manager.blocks_needed(match, num_tokens), manager.num_free_blocks
        outcome = manager.allocate(sequence.table, match, num_tokens, resumed=sequence.admitted_before)
        if isinstance(outcome, PoolExhausted):
            assert outcome == PoolExhausted(needed, free) and needed > free
            self.waiting.append(sequence)
            return
        assert manager.num_free_blocks == free - needed
        assert len(sequence.table.block_ids) * manager.block_size >= num_tokens
        self._handed_out(outcome)
        sequence.num_computed = match.num_cached_tokens
        sequence.admitted_before = True
        self.running.append(sequence)

    def fork(self, parent: Sequence, num_computed: int, num_ahead: int) -> None:
        """A child with the parent's first `num_computed` positions goes on from there, or there is no room."""
        if parent.is_moving or not 0 < num_computed <= parent.num_computed:
            return
        child = Sequence([*parent.token_ids[:num_computed], 1], parent.tenant)
        num_tokens = len(child.token_ids) + num_ahead
        free, before = self.manager.num_free_blocks, set(parent.table.block_ids)
        outcome = self.manager.fork(parent.table, child.table, num_computed, num_tokens)
        if isinstance(outcome, PoolExhausted):
            assert outcome.needed > outcome.free == free and not child.table.block_ids
            return
        own = [block_id for block_id in child.table.block_ids if block_id not in before]
        assert free - self.manager.num_free_blocks == len(own)
        assert before.isdisjoint(child.table.block_ids[num_computed // self.manager.block_size :]), "it would write there"
        self._handed_out(own)
        child.num_computed, child.admitted_before, child.is_moving = num_computed, True, True
        self.moves["copy"].append((child, outcome))
        self.running.append(child)
        self.counts["fork"] += 1

    def rewrite(self, sequence: Sequence, position: int, token_ids: list[int]) -> None:
        """A sequence goes on with other tokens from `position` on."""
        if sequence.is_moving or not 0 < position <= sequence.num_computed:
            return
        self.flush()
        old = list(sequence.table.block_ids)
        outcome = self.manager.copy_on_write(sequence.table, position)
        if isinstance(outcome, PoolExhausted):
            assert outcome.needed > outcome.free == self.manager.num_free_blocks and sequence.table.block_ids.tolist() == old
            return
        self._handed_out([new for new, before in zip(sequence.table.block_ids, old, strict=True) if new != before])
        sequence.replace_from(position, token_ids)
        sequence.num_computed, sequence.is_moving = position, True
        self.moves["copy"].append((sequence, outcome))
        self.counts["copy_on_write"] += 1

    def swap_out(self, sequence: Sequence) -> None:
        if sequence.is_moving:
            self.flush()
        if not sequence.num_computed:
            return
        free = self.manager.num_free_host_blocks
        outcome = self.manager.swap_out(sequence.table, sequence.num_computed)
        if isinstance(outcome, HostPoolExhausted):
            assert outcome == HostPoolExhausted(self.manager.blocks_spanned(sequence.num_computed), free)
            assert outcome.needed > outcome.free
            return
        self.moves["out"].append((sequence, outcome))
        sequence.is_moving = True
        self.running.remove(sequence)
        self.swapped.append(sequence)
        self.counts["swap_out"] += 1

    def swap_in(self, sequence: Sequence, num_ahead: int) -> None:
        if sequence.is_moving:
            self.flush()
        manager = self.manager
        known = sequence.token_ids[: sequence.num_computed + 1]
        match = manager.match(sequence.table, known)
        self._check_hit(sequence, match.block_ids, len(known))
        num_tokens = len(sequence.token_ids) + num_ahead
        needed, free = manager.blocks_needed(match, num_tokens), manager.num_free_blocks
        outcome = manager.swap_in(sequence.table, match, num_tokens)
        if isinstance(outcome, PoolExhausted):
            assert outcome == PoolExhausted(needed, free) and needed > free
            return
        assert manager.num_free_blocks == free - needed
        self._handed_out(sequence.table.block_ids[len(match.block_ids) :])
        self.moves["in"].append((sequence, outcome))
        sequence.is_moving = True
        self.swapped.remove(sequence)
        self.running.append(sequence)
        self.counts["swap_in"] += 1

    def compute(self, sequence: Sequence, num_tokens: int) -> None:
        """One step over the next `num_tokens` committed positions."""
        self.flush()
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
        self.flush()
        num_committed = len(sequence.token_ids)
        self._advance(sequence, num_committed)
        sequence.token_ids += drafts
        self._write(sequence, num_committed, len(sequence.token_ids))
        sequence.replace_from(num_committed + num_accepted, [3])
        self._advance(sequence, num_committed + num_accepted)

    def preempt(self, sequence: Sequence) -> None:
        self.finish(sequence)
        sequence.num_computed = 0
        self.waiting.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Whatever was to be moved for it is not moved; what is to be copied from it still is."""
        for moves in self.moves.values():
            moves[:] = [(owner, pairs) for owner, pairs in moves if owner is not sequence]
        sequence.is_moving = False
        (self.swapped if sequence in self.swapped else self.running).remove(sequence)
        self.manager.free(sequence.table)

    def reset(self) -> None:
        tables = [sequence.table for sequence in self.running] + self.manager._copied_from
        held = {block_id for table in tables for block_id in table.block_ids}
        unused = [block_id for block_id in self.cached if block_id not in held]
        assert self.manager.forget_unused() == len(unused)
        for block_id in unused:
            del self.cached[block_id]
        self.counts["reset"] += 1

    # -- what a worker does

    def flush(self) -> None:
        """The next batch moves blocks: out, copies, in, zero."""
        self.step += 1
        outs, copies, ins = ([pair for _, pairs in self.moves[kind] for pair in pairs] for kind in ("out", "copy", "in"))
        zeroed = self.manager.seal_batch()
        targets = [target for _, target in copies + ins] + zeroed
        assert len(set(targets)) == len(targets), "a block is overwritten twice"
        assert {source for source, _ in copies}.isdisjoint(targets), "a copy's source is overwritten"
        for source, target in outs:
            self.host_kv[target] = list(self.kv[source])
        for source, target in copies:
            self.kv[target] = list(self.kv[source])
        for source, target in ins:
            self.kv[target] = list(self.host_kv[source])
        for block_id in zeroed:
            self.kv[block_id] = [0] * self.manager.block_size
        for block_id in targets:
            self.last_write_steps[block_id] = self.step
        for moves in self.moves.values():
            for sequence, _ in moves:
                sequence.is_moving = False
            moves.clear()
        if self.options.get("secure_zero"):
            self._check_zeroed()

    def _advance(self, sequence: Sequence, stop: int) -> None:
        """Write committed positions up to `stop`, and publish what became full."""
        self._write(sequence, sequence.num_computed, stop)
        sequence.num_computed = max(stop, sequence.num_computed)
        self.manager.publish(sequence.table, sequence.token_ids, stop, self.step)
        if not self.manager.enable_prefix_caching:
            return
        size, table = self.manager.block_size, sequence.table
        assert table.num_published == stop // size or self.digests_collide
        for index in range(table.num_published):
            self.cached[table.block_ids[index]] = sequence.marks_of(0, stop)[(index + 1) * size - 1]

    def _write(self, sequence: Sequence, first: int, stop: int) -> None:
        size = self.manager.block_size
        for position, mark in zip(range(first, stop), sequence.marks_of(first, stop), strict=True):
            block_id = sequence.table.block_ids[position // size]
            self.kv[block_id][position % size] = mark
            self.last_write_steps[block_id] = self.step

    # -- what a store does

    def write_journal(self) -> None:
        changes = self.manager.take_changes()
        for block_id in changes.unpublished:
            self.journal.pop(block_id, None)
        self.journal.update({entry.block_id: entry for entry in changes.published})
        assert self.journal == {entry.block_id: entry for entry in self.manager.published()}

    def restart(self) -> None:
        """A new manager from what the worker holds and what the journal tells; nothing computed is lost if it was up to date."""
        self.flush()
        old, size = self.manager, self.manager.block_size
        everyone = self.running + self.swapped
        is_told = not old._cache._changed and all(
            old.enable_prefix_caching and item.table.num_published == item.num_computed // size for item in self.running
        )
        self.manager = BlockManager(old.num_blocks, size, **self.options)
        entries = [e for e in self.journal.values() if self.last_write_steps[e.block_id] <= e.published_step]
        held = []
        for sequence in everyone:
            table = sequence.table
            sequence.table = BlockTable(table.block_ids, host_block_ids=table.host_block_ids, namespace=table.namespace)
            held.append(HeldTable(sequence.table, sequence.token_ids, sequence.num_computed))
        told = self.manager.adopt(held, entries, self.step)
        assert sorted(told, key=lambda entry: entry.block_id) == list(self.manager.published())
        assert self.manager.num_free_blocks == old.num_free_blocks
        assert self.manager.num_free_host_blocks == old.num_free_host_blocks
        if is_told and old.enable_prefix_caching:
            assert self.manager.published() == old.published()
            assert self.manager.take_changes() == BlockChanges((), ())
        self.journal = {entry.block_id: entry for entry in entries}
        self.write_journal()
        self.cached = {block_id: marks[-1] for block_id, marks in self._published_marks().items()}
        self.counts["restart"] += 1

    # -- what must hold

    def check(self) -> None:
        """After every move."""
        manager = self.manager
        manager.check_integrity([sequence.table for sequence in self.running + self.swapped])
        published = self._published_marks()
        for block_id, marks in published.items():
            assert self.kv[block_id] == marks, "an entry for KV that is not there"
        assert {block_id: marks[-1] for block_id, marks in published.items()} == self.cached
        for sequence in self.running + self.swapped:
            if sequence.is_moving:
                continue
            table = sequence.table
            memory, block_ids = (self.host_kv, table.host_block_ids) if table.host_block_ids else (self.kv, table.block_ids)
            cells = [mark for block_id in block_ids for mark in memory[block_id]]
            expected = sequence.marks_of(0, sequence.num_computed)
            assert cells[: sequence.num_computed] == expected, "somebody wrote over a sequence's KV"

    def end(self) -> None:
        """Everything can be freed, and then everything is free."""
        for sequence in self.running + self.swapped:
            self.finish(sequence)
        self.flush()
        self.check()
        assert self.manager.num_free_blocks == self.manager.num_blocks
        assert self.manager.num_free_host_blocks == len(self.host_kv)

    def _check_hit(self, sequence: Sequence, block_ids: list[int], num_tokens: int) -> None:
        """The longest there is, and KV of the sequence's own prefix."""
        size, cached, marks = self.manager.block_size, set(self.cached.values()), sequence.marks_of(0, num_tokens)
        length = 0
        while length + size < num_tokens and marks[length + size - 1] in cached:
            length += size
        assert len(block_ids) * size == length or not self.manager.enable_prefix_caching
        held = [mark for block_id in block_ids for mark in self.kv[block_id]]
        assert held == marks[: len(held)], "a hit on KV of another prefix"
        self.counts["hit"] += bool(block_ids)

    def _check_zeroed(self) -> None:
        """Nobody's table reaches what another tenant wrote."""
        for sequence in self.running:
            marks = {mark for block_id in sequence.table.block_ids for mark in self.kv[block_id] if mark}
            assert all(mark & 3 == sequence.tenant + 1 for mark in marks), "a block with another tenant's KV"

    def _handed_out(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            self.cached.pop(block_id, None)

    def _published_marks(self) -> dict[int, list[int]]:
        """By published block the marks that it stands for."""
        entries = self.manager.published()
        by_digest = {entry.digest: entry for entry in entries}
        known: dict[int, list[int]] = {}

        def marks(entry: PublishedBlock) -> list[int]:
            if entry.digest not in known:
                mark = self.links[entry.namespace] + 1 if entry.parent is None else marks(by_digest[entry.parent])[-1]
                found = known[entry.digest] = []
                for token_id in entry.token_ids:
                    mark = next_mark(mark, token_id)
                    found.append(mark)
            return known[entry.digest]

        return {entry.block_id: marks(entry) for entry in entries}


def random_moves(rng: random.Random, pool: Pool, count: int, restarts: bool = True) -> None:
    """Drive a pool with mostly short prompts of two token ids, and check it after every move."""
    for _ in range(count):
        _random_move(rng, pool, restarts)
        pool.check()


def _random_move(rng: random.Random, pool: Pool, restarts: bool) -> None:
    move = rng.random()
    if move < 0.17:
        del pool.waiting[8:]  # some never fit
        tokens = [rng.randrange(2) for _ in range(rng.randint(1, 24))]
        pool.admit(Sequence(tokens, rng.choice((0, 0, 1, 2))), rng.randrange(3))
    elif move < 0.27 and pool.waiting:
        pool.admit(pool.waiting.pop(rng.randrange(len(pool.waiting))), 1)
    elif move < 0.28 and restarts:
        pool.restart()
    elif move < 0.283:
        pool.reset()
    elif move < 0.36:
        pool.write_journal()
    elif move < 0.42 and pool.swapped:
        pool.swap_in(rng.choice(pool.swapped), 1)
    elif move < 0.425 and pool.swapped:
        pool.finish(rng.choice(pool.swapped))
    elif pool.running:
        sequence = rng.choice(pool.running)
        if len(sequence.token_ids) > 60 or move < 0.5:
            pool.finish(sequence)
        elif move < 0.54:
            pool.preempt(sequence)
        elif move < 0.59:
            pool.fork(sequence, rng.randint(0, len(sequence.token_ids)), rng.randrange(3))
        elif move < 0.61:
            tokens = [rng.randrange(2) for _ in range(rng.randint(1, 3))]
            pool.rewrite(sequence, rng.randint(0, len(sequence.token_ids)), tokens)
        elif move < 0.65:
            pool.swap_out(sequence)
        elif sequence.num_computed < len(sequence.token_ids) - 1:
            pool.compute(sequence, rng.randint(1, 12))
        else:
            drafts = [rng.randrange(2) for _ in range(rng.randrange(4))]
            pool.decode(sequence, drafts, rng.randint(0, len(drafts)))
