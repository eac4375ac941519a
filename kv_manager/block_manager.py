"""The block manager: who holds which KV block, which blocks can be shared, and which are free."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from kv_manager.adoption import EntriesByBlock, eviction_order, restore_entries
from kv_manager.block import Blocks
from kv_manager.block_table import BlockTable, HeldTable
from kv_manager.free_list import FreeList
from kv_manager.hash_chain import TokenIds, chain_digests, namespace_link
from kv_manager.prefix_index import HashPrefixIndex, PrefixIndex
from kv_manager.published_block import PublishedBlock
from kv_manager.published_blocks import PublishedBlocks


@dataclass(frozen=True, slots=True)
class PoolExhausted:
    """A request for blocks that changed nothing: it takes `needed` blocks out of the free list, which has `free`."""

    needed: int
    free: int


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Cached blocks a sequence of `num_tokens` tokens can start with. No references: good until the pool changes.

    `free_block_ids` are those of `block_ids` that sit in the free list; taking one costs a free block like a fresh one does.
    """

    num_tokens: int
    num_cached_tokens: int
    block_ids: list[int]
    free_block_ids: list[int]
    pool_version: int


@dataclass(frozen=True, slots=True)
class BlockChanges:
    """Prefix-cache entries that appeared and went since the last call. Apply `unpublished` first; absolute, so twice is once."""

    published: Sequence[PublishedBlock]
    unpublished: tuple[int, ...]


@dataclass(slots=True)
class PrefixCacheStats:
    """Tokens since the start: looked up and found at first admissions, and found when a preempted sequence came back."""

    query_tokens: int = 0
    hit_tokens: int = 0
    resume_cached_tokens: int = 0


class BlockManager:
    """A fixed pool of `num_blocks` blocks of `block_size` tokens. Pure: it decides, a worker moves the bytes.

    Every block is in the free list (reference count 0) or in as many tables as its reference count. A block is published in the
    prefix index when its KV is computed and its tokens committed, and stays so, held or free, until it is handed out again.
    `namespace` separates chains whose KV must never be shared (weights, KV format, ...).
    """

    def __init__(self, num_blocks: int, block_size: int, namespace: bytes = b"", enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.stats = PrefixCacheStats()
        self._blocks = Blocks(num_blocks, block_size)
        self._free = FreeList(num_blocks)
        self._index: PrefixIndex = HashPrefixIndex(self._blocks)
        self._namespace_link = namespace_link(namespace)
        self._changed: set[int] = set()
        self._pool_version = 0

    @property
    def num_free_blocks(self) -> int:
        """Blocks no table holds, cached ones included."""
        return len(self._free)

    def blocks_spanned(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens take: ceil(num_tokens / block_size)."""
        return -(-num_tokens // self.block_size)

    def match(self, table: BlockTable, token_ids: TokenIds) -> PrefixMatch:
        """Longest cached prefix of a sequence in whole blocks, leaving at least one token to compute. Takes nothing.

        `token_ids` are all the sequence's committed tokens. Fills `table.digests`, so that asking again hashes nothing.
        """
        num_tokens = len(token_ids)
        usable = (num_tokens - 1) // self.block_size
        if usable <= 0 or not self.enable_prefix_caching:
            return PrefixMatch(num_tokens, 0, [], [], self._pool_version)
        num_full = num_tokens // self.block_size
        rows = self._rows(token_ids, 0, num_full)
        self._extend_chain(table, rows[len(table.digests) :])
        block_ids = self._index.longest_match(table.digests[:usable], rows[:usable])
        ref_counts = self._blocks.ref_counts
        free_block_ids = [block_id for block_id in block_ids if not ref_counts[block_id]]
        return PrefixMatch(num_tokens, len(block_ids) * self.block_size, block_ids, free_block_ids, self._pool_version)

    def likely_cached_len(self, table: BlockTable, token_ids: TokenIds) -> int:
        """Tokens that `match` would find cached, told from digests alone: for choosing between pools. Takes nothing; fills `table.digests`."""
        usable, num_full = (len(token_ids) - 1) // self.block_size, len(token_ids) // self.block_size
        if usable <= 0 or not self.enable_prefix_caching:
            return 0
        if len(table.digests) < num_full:
            self._extend_chain(table, self._rows(token_ids, len(table.digests), num_full))
        return self._index.likely_match_len(table.digests[:usable]) * self.block_size

    def blocks_needed(self, match: PrefixMatch, num_tokens: int) -> int:
        """Blocks that leave the free list when a sequence with this match gets a table for `num_tokens` tokens."""
        return self.blocks_spanned(num_tokens) - len(match.block_ids) + len(match.free_block_ids)

    def allocate(
        self, table: BlockTable, match: PrefixMatch, num_tokens: int, *, resumed: bool = False
    ) -> list[int] | PoolExhausted:
        """Fill an empty table for `num_tokens` tokens: the match's blocks, then fresh ones, which are returned. All or nothing.

        `resumed`: the sequence was admitted before, so its hits are its own work and count separately.
        """
        assert not table.block_ids, "the table holds blocks already"
        assert match.pool_version == self._pool_version, "the pool changed since the match"
        assert num_tokens > match.num_cached_tokens, "a sequence needs a position to compute"
        needed = self.blocks_needed(match, num_tokens)
        if needed > len(self._free):
            return PoolExhausted(needed, len(self._free))
        self._pool_version += 1
        self._free.take_cached(match.free_block_ids)
        ref_counts = self._blocks.ref_counts
        for block_id in match.block_ids:
            ref_counts[block_id] += 1
        fresh = self._take(needed - len(match.free_block_ids))
        table.block_ids = match.block_ids + fresh
        table.num_published = len(match.block_ids)
        self._count(match, resumed)
        return fresh

    def append(self, table: BlockTable, num_tokens: int) -> list[int] | PoolExhausted:
        """Grow a table to `num_tokens` tokens and return the new blocks, none where it is long enough. All or nothing."""
        needed = self.blocks_spanned(num_tokens) - len(table.block_ids)
        if needed <= 0:
            return []
        if needed > len(self._free):
            return PoolExhausted(needed, len(self._free))
        self._pool_version += 1
        fresh = self._take(needed)
        table.block_ids += fresh
        return fresh

    def publish(self, table: BlockTable, token_ids: TokenIds, num_tokens: int, step: int) -> None:
        """Publish the table's full blocks below position `num_tokens` that are not published yet.

        The caller vouches that the first `num_tokens` of `token_ids` are committed and their KV computed, the last of them in the
        output of worker step `step`. Where a digest already stands for other content, publishing stops before that block.
        """
        self._publish(table, token_ids, num_tokens, step, 0)

    def _publish(self, table: BlockTable, token_ids: TokenIds, num_tokens: int, step: int, num_journalled: int) -> None:
        """See `publish`; the journal knows of the first `num_journalled` blocks already."""
        first, stop = table.num_published, num_tokens // self.block_size
        if stop <= first or not self.enable_prefix_caching:
            return
        assert stop <= len(table.block_ids), "more tokens computed than the table covers"
        rows = self._rows(token_ids, first, stop)
        self._extend_chain(table, rows[len(table.digests) - first :])
        block_ids = table.block_ids[first:stop]
        parent = table.digests[first - 1] if first else None
        count = self._index.insert(parent, block_ids, table.digests[first:stop], rows, step)
        self._changed.update(block_ids[num_journalled:count])
        table.num_published += count

    def free(self, table: BlockTable) -> None:
        """Give up all blocks of a table, the tail first, so that the tail is evicted first. An empty table stays empty."""
        if not table.block_ids:
            return
        self._pool_version += 1
        ref_counts, digests = self._blocks.ref_counts, self._blocks.digests
        cached = []
        for block_id in reversed(table.block_ids):
            count = ref_counts[block_id] - 1
            assert count >= 0, f"block {block_id} is freed more often than held"
            ref_counts[block_id] = count
            if count:
                continue
            if digests[block_id] is None:
                self._free.release_plain(block_id)
            else:
                cached.append(block_id)
        self._free.release_cached(cached)
        table.block_ids = []
        table.num_published = 0

    def take_changes(self) -> BlockChanges:
        """What the journal has to learn: the present state of every block published or unpublished since the last call."""
        digests = self._blocks.digests
        changed = sorted(self._changed)
        self._changed.clear()
        published = self._blocks.published([block_id for block_id in changed if digests[block_id] is not None])
        return BlockChanges(published, tuple(block_id for block_id in changed if digests[block_id] is None))

    def published(self) -> PublishedBlocks:
        """All prefix-cache entries, by block id: what a journal that is rewritten starts from."""
        digests = self._blocks.digests
        return self._blocks.published([block_id for block_id, digest in enumerate(digests) if digest is not None])

    def adopt(self, held: Sequence[HeldTable], published: Iterable[PublishedBlock], step: int) -> PublishedBlocks:
        """Take over live tables and journalled prefix-cache entries into an unused manager; the rest of the pool is free.

        Reference counts and the free list follow from the tables. About a held block its table alone decides: the full computed
        ones are published (as of `step`, the last the worker executed, where no entry names its own), and no other is, because its
        holder may write it any time. Free blocks keep their entries where the prefix is still there; of two for one block the later
        counts. What differs from `published` afterwards is pending in `take_changes`. Returns what `published()` would, in any order.
        """
        assert len(self._free) == self.num_blocks and not self._changed, "only an unused manager adopts"
        blocks = self._blocks
        recorded = EntriesByBlock(PublishedBlocks.of(published), self.num_blocks)
        for item in held:
            for block_id in item.table.block_ids:
                blocks.ref_counts[block_id] += 1
        is_recalled = np.zeros(self.num_blocks, np.bool_)
        for item in held:
            is_recalled[self._adopt_table(item, recorded, step)] = True
        entries = recorded.entries
        holds, free_entries = self._settle_steps(entries, is_recalled[entries.block_ids])
        levels = restore_entries(self._index, blocks, free_entries if self.enable_prefix_caching else ())
        cached = eviction_order(levels)
        self._changed.difference_update(cached)
        uncached = zip(blocks.ref_counts, blocks.digests, strict=True)
        self._free.refill([b for b, (count, digest) in enumerate(uncached) if not count and digest is None], cached)
        holds |= np.isin(entries.block_ids, cached)
        new = [block_id for block_id in self._changed if blocks.digests[block_id] is not None]
        return PublishedBlocks.concatenate([entries.select(holds), blocks.published(new)])

    def check_integrity(self, tables: Sequence[BlockTable]) -> None:
        """Assert that `tables` (all that hold blocks), reference counts, free list and prefix index tell one story."""
        holders = Counter(block_id for table in tables for block_id in table.block_ids)
        for table in tables:
            assert len(set(table.block_ids)) == len(table.block_ids), f"a table holds a block twice: {table.block_ids}"
        wrong = [b for b, count in enumerate(self._blocks.ref_counts) if count != holders[b]]
        assert not wrong, f"reference counts differ from the tables' for blocks {wrong}"
        free = list(islice(self._free, self.num_blocks + 1))  # a broken list may not end
        assert len(free) == len(self._free) == len(set(free)), "a block is free twice, or the count is wrong"
        assert set(free) == set(range(self.num_blocks)) - holders.keys(), "free and held blocks are not the whole pool"
        plain = [self._blocks.digests[block_id] is None for block_id in free]
        assert plain == sorted(plain, reverse=True), "a cached block would be handed out before one without content"
        for table in tables:
            count = table.num_published
            content = [self._blocks.digests[block_id] for block_id in table.block_ids]
            assert content[:count] == table.digests[:count], "a published block holds something else than its table says"
            assert all(digest is None for digest in content[count:]), "a block is published that its table still writes"
        self._index.check_integrity()

    def _rows(self, token_ids: TokenIds, first: int, stop: int) -> npt.NDArray[np.int32]:
        """Token ids of the sequence's blocks `[first, stop)`, int32 `[stop - first, block_size]`."""
        ids = np.asarray(token_ids[first * self.block_size : stop * self.block_size], dtype=np.int32)
        return ids.reshape(stop - first, self.block_size)

    def _adopt_table(self, held: HeldTable, recorded: EntriesByBlock, step: int) -> npt.NDArray[np.int64]:
        """Publish a live table's computed blocks. Returns those whose entry says the same: their digests are taken from it, not computed."""
        num_full = held.num_computed // self.block_size
        block_ids = np.array(held.table.block_ids[:num_full], np.int64)
        if self.enable_prefix_caching and num_full and not held.table.digests:
            held.table.digests = recorded.digests_of(block_ids, self._rows(held.token_ids, 0, num_full))
            num_recalled = len(held.table.digests)
        else:
            num_recalled = 0
        self._publish(held.table, held.token_ids, held.num_computed, step, num_recalled)
        return block_ids[: min(num_recalled, held.table.num_published)]

    def _settle_steps(
        self, entries: PublishedBlocks, is_recalled: npt.NDArray[np.bool_]
    ) -> tuple[npt.NDArray[np.bool_], PublishedBlocks]:
        """Of published blocks take the steps that `entries`, one a block, name, where the digests agree; of those recalled they do.

        Returns which agree, and of the others those of free blocks; of everything that disagrees the journal has to learn.
        """
        now, refs, agrees = self._blocks.digests, self._blocks.ref_counts, is_recalled.copy()
        others = entries.select(~is_recalled)
        pairs = zip(others.block_ids.tolist(), others.digests.tolist(), strict=True)
        agrees[~is_recalled] = [now[block_id] == digest for block_id, digest in pairs]
        steps = np.array(self._blocks.published_steps, np.int64)
        steps[entries.block_ids[agrees]] = entries.published_steps[agrees]
        self._blocks.published_steps = steps.tolist()
        is_told = np.zeros(self.num_blocks, np.bool_)
        is_told[entries.block_ids[agrees]] = True
        self._changed = {block_id for block_id in self._changed if not is_told[block_id]}
        differing = entries.select(~agrees)
        self._changed.update(differing.block_ids.tolist())
        return agrees, differing.select(np.array([not refs[block_id] for block_id in differing.block_ids.tolist()], np.bool_))

    def _extend_chain(self, table: BlockTable, rows: npt.NDArray[np.int32]) -> None:
        """Hash the blocks that follow those the table has digests of, int32 `[blocks, block_size]`."""
        if len(rows):
            table.digests += chain_digests(rows, table.digests[-1] if table.digests else self._namespace_link)

    def _take(self, count: int) -> list[int]:
        """Hand out `count` free blocks with one reference each; their cached content is forgotten now."""
        block_ids = self._free.take(count)
        ref_counts, digests = self._blocks.ref_counts, self._blocks.digests
        for block_id in block_ids:
            ref_counts[block_id] = 1
            if digests[block_id] is not None:
                self._index.remove(block_id)
                self._changed.add(block_id)
        return block_ids

    def _count(self, match: PrefixMatch, resumed: bool) -> None:
        if resumed:
            self.stats.resume_cached_tokens += match.num_cached_tokens
        else:
            self.stats.query_tokens += match.num_tokens
            self.stats.hit_tokens += match.num_cached_tokens
