"""The block manager: who holds which KV block, which blocks can be shared, and which are free."""

from array import array
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kv_manager.allocation import BlockPairs, PoolExhausted, PrefixMatch
from kv_manager.block import Blocks
from kv_manager.block_table import BlockTable, HeldTable
from kv_manager.block_tenants import BlockTenants
from kv_manager.free_list import FreeList
from kv_manager.hash_chain import TokenIds
from kv_manager.host_pool import HostPool, HostPoolExhausted
from kv_manager.integrity import check_pool
from kv_manager.prefix_cache import BlockChanges, PrefixCache
from kv_manager.prefix_cache_stats import PrefixCacheStats
from kv_manager.prefix_index import HashPrefixIndex, PrefixIndex
from kv_manager.published_block import PublishedBlock
from kv_manager.published_blocks import PublishedBlocks
from kv_manager.radix_index import RadixPrefixIndex

PREFIX_INDEXES: dict[str, Callable[[Blocks], PrefixIndex]] = {"hash": HashPrefixIndex, "radix": RadixPrefixIndex}


class BlockManager:
    """A fixed pool of `num_blocks` blocks of `block_size` tokens. Pure: it decides, a worker moves the bytes.

    Every block is in the free list (reference count 0) or in as many tables as its reference count. A block is published in the
    prefix index when its KV is computed and its tokens committed, and stays so, held or free, until it is handed out again.
    `namespace` separates chains whose KV must never be shared (weights, KV format, ...); a table's own does so within the pool. Of
    `num_host_blocks` host blocks each is free or in the one table that is swapped out to it.

    `prefix_index` is one of `PREFIX_INDEXES`; both find the same hits.
    `secure_zero`: a block whose last holder was of another namespace, or is unknown, is named to be zeroed when it is handed out.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        namespace: bytes = b"",
        enable_prefix_caching: bool = True,
        num_host_blocks: int = 0,
        secure_zero: bool = False,
        prefix_index: str = "hash",
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.stats = PrefixCacheStats()
        self._blocks = Blocks(num_blocks, block_size)
        self._free = FreeList(num_blocks)
        self._host = HostPool(num_host_blocks)
        self._cache = PrefixCache(self._blocks, namespace, enable_prefix_caching, PREFIX_INDEXES[prefix_index])
        self._pool_version = 0
        self._copied_from: list[BlockTable] = []  # held until the batch that copies from them is sealed
        self._tenants = BlockTenants(num_blocks) if secure_zero else None

    @property
    def enable_prefix_caching(self) -> bool:
        """Whether blocks are published and hit at all."""
        return self._cache.is_enabled

    @property
    def num_free_blocks(self) -> int:
        """Blocks no table holds, cached ones included."""
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks in the prefix cache, free and held."""
        return int(np.count_nonzero(self._blocks.is_published_view))

    @property
    def num_free_host_blocks(self) -> int:
        """Host blocks that a swap out can take now."""
        return self._host.num_free

    def blocks_spanned(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens take: ceil(num_tokens / block_size)."""
        return -(-num_tokens // self.block_size)

    def match(self, table: BlockTable, token_ids: TokenIds) -> PrefixMatch:
        """Longest cached prefix of a sequence in whole blocks, leaving at least one token to compute. Takes nothing.

        `token_ids` are all the sequence's committed tokens, and `table` holds no blocks. Fills `table.digests`, so that asking again hashes
        nothing.
        """
        assert not table.num_published, "the table has what it could hit"
        block_ids = self._cache.longest_match(table, token_ids)
        ref_counts = self._blocks.ref_counts
        free_block_ids = [block_id for block_id in block_ids if not ref_counts[block_id]]
        num_cached_tokens = len(block_ids) * self.block_size
        return PrefixMatch(len(token_ids), num_cached_tokens, block_ids, free_block_ids, self._pool_version)

    def likely_cached_len(self, table: BlockTable, token_ids: TokenIds) -> int:
        """Tokens that `match` would find cached, told from digests alone: for choosing between pools. Takes nothing; fills
        `table.digests`."""
        return self._cache.likely_match_len(table, token_ids) * self.block_size

    def blocks_needed(self, match: PrefixMatch, num_tokens: int) -> int:
        """Blocks that leave the free list when a sequence with this match gets a table for `num_tokens` tokens."""
        return self.blocks_spanned(num_tokens) - len(match.block_ids) + len(match.free_block_ids)

    def allocate(
        self, table: BlockTable, match: PrefixMatch, num_tokens: int, *, resumed: bool = False
    ) -> list[int] | PoolExhausted:
        """Fill an empty table for `num_tokens` tokens: the match's blocks, then fresh ones, which are returned. All or nothing.

        `resumed`: the sequence was admitted before, so its hits are its own work and count separately.
        """
        assert not table.block_ids and not table.host_block_ids, "the table holds blocks already"
        assert match.pool_version == self._pool_version, "the pool changed since the match"
        assert num_tokens > match.num_cached_tokens, "a sequence needs a position to compute"
        needed = self.blocks_needed(match, num_tokens)
        if needed > len(self._free):
            return PoolExhausted(needed, len(self._free))
        self.stats.count(match.num_tokens, match.num_cached_tokens, resumed)
        return self._fill(table, match, num_tokens)

    def append(self, table: BlockTable, num_tokens: int) -> list[int] | PoolExhausted:
        """Grow a table to `num_tokens` tokens and return the new blocks, none where it is long enough. All or nothing."""
        needed = self.blocks_spanned(num_tokens) - len(table.block_ids)
        if needed <= 0:
            return []
        fresh = self._take(needed, table)
        if not isinstance(fresh, PoolExhausted):
            table.block_ids.extend(fresh)
        return fresh

    def append_next(self, tables: Sequence[BlockTable]) -> list[int]:
        """Grow each of these tables by one block and return those, in this order; there must be as many free ones."""
        block_ids = self._hand_out(len(tables))
        for table, block_id in zip(tables, block_ids, strict=True):
            table.block_ids.append(block_id)
            if self._tenants is not None:
                self._tenants.hand_over((block_id,), table.namespace)
        return block_ids

    def num_shared_by_fork(self, parent: BlockTable, num_computed: int) -> int:
        """Blocks that a child of this parent has from it by reference (see `fork`): so many fewer leave the free list."""
        num_full = num_computed // self.block_size
        return min(num_full, parent.num_published) if self.enable_prefix_caching else num_full

    def fork(self, parent: BlockTable, child: BlockTable, num_computed: int, num_tokens: int) -> BlockPairs | PoolExhausted:
        """Fill the empty table of a child, for `num_tokens` tokens, with the KV of its parent's first `num_computed` positions. All or
        nothing.

        The caller vouches that both have the same tokens there, and that batches already issued compute them in the parent's table.
        The full blocks below `num_computed` are shared by reference; the block that holds the positions after them is a fresh
        one, and the returned pair copies it. The pairs go into the `copies` of the batch in which the child enters its slot; until
        that is sealed nobody gets a block that is copied, even should the parent give it up. Nobody writes into a shared block: the
        child computes from `num_computed` on, in blocks of its own, and the parent behind it.

        (A full block that could not be published is copied as well: which of its holders publishes it could not be told.)
        """
        assert not child.block_ids and not child.host_block_ids, "the child holds blocks already"
        assert child.namespace == parent.namespace, "a child is of its parent's namespace"
        assert num_computed <= len(parent.block_ids) * self.block_size, "the parent's table does not cover what is shared"
        assert num_tokens > num_computed, "a sequence needs a position to compute"
        num_shared = self.num_shared_by_fork(parent, num_computed)
        fresh = self._take(self.blocks_spanned(num_tokens) - num_shared, child)
        if isinstance(fresh, PoolExhausted):
            return fresh
        ref_counts, shared = self._blocks.ref_counts, parent.block_ids[:num_shared]
        for block_id in shared:
            ref_counts[block_id] += 1
        child.block_ids = shared + array("i", fresh)
        child.num_published = min(num_shared, parent.num_published)
        del child.digests[: child.num_published]
        copied = parent.block_ids[: self.blocks_spanned(num_computed)]
        return self._copied(zip(copied[num_shared:], fresh, strict=False), copied)

    def copy_on_write(self, table: BlockTable, position: int) -> BlockPairs | PoolExhausted:
        """Make a table the only holder of its blocks from that of `position` on, so that it may write there other tokens than before.
        All or nothing.

        For a caller whose sequence goes on in place with other tokens. The scheduler is none so far: `fork` copies beforehand what a
        child is to write into, and a sequence that restarts from other tokens takes a new table.

        Each of these blocks that another table shares, or that is published, is replaced by a fresh one; what was published stays
        so. Where tokens before `position` lie in such a block, the returned pair copies it; it goes into the `copies` of the batch in
        which the sequence enters its slot anew, with this table. The digests from there on are forgotten.
        """
        first = position // self.block_size
        replaced = [i for i in range(first, len(table.block_ids)) if self._is_shared_or_published(table.block_ids[i])]
        fresh = self._take(len(replaced), table)
        if isinstance(fresh, PoolExhausted):
            return fresh
        block_ids = table.block_ids[:]
        for index, block_id in zip(replaced, fresh, strict=True):
            block_ids[index] = block_id
        is_copied = position % self.block_size and first in replaced
        copied = table.block_ids[: first + 1]
        pairs = self._copied([(copied[first], block_ids[first])] if is_copied else [], copied)
        self._release([table.block_ids[index] for index in replaced])
        table.block_ids = block_ids
        del table.digests[max(0, first - table.num_published) :]
        table.num_published = min(table.num_published, first)
        return pairs

    def swap_out(self, table: BlockTable, num_computed: int) -> BlockPairs | HostPoolExhausted:
        """Move a table to the host: its blocks are free, and as many host blocks as span `num_computed` positions are its own. All or
        nothing.

        `num_computed` includes positions of batches in flight, which the worker executes before it copies. The pairs (block, host block) go
        into the `swap_outs` of the next batch. Published blocks stay in the prefix cache while nobody takes them. Until it is
        swapped in again the table is not grown, forked or published; `free` gives it up.
        """
        assert table.block_ids, "the table holds no blocks"
        count = self.blocks_spanned(num_computed)
        assert count <= len(table.block_ids), "more tokens computed than the table covers"
        if count > self._host.num_free:
            return HostPoolExhausted(count, self._host.num_free)
        host_block_ids = self._host.take(count)
        pairs = list(zip(table.block_ids, host_block_ids, strict=False))
        self.free(table)
        table.host_block_ids = tuple(host_block_ids)
        return pairs

    def swap_in(self, table: BlockTable, match: PrefixMatch, num_tokens: int) -> BlockPairs | PoolExhausted:
        """Move a table back into the pool, for `num_tokens` tokens: the match's blocks, then fresh ones. All or nothing.

        `match` is that of the sequence's first `computed + 1` tokens, so that no position is computed into a shared block again;
        `blocks_needed(match, num_tokens)` blocks leave the free list. The pairs (host block, block) of the blocks behind the match go
        into the `swap_ins` of the next batch; its host blocks are free for swap outs of the batches after that (`seal_batch`). Blocks
        behind the match are published by the first `publish` after the output of that batch, or a later one. Host blocks behind
        `num_tokens` held nothing but drafts that were rejected since.
        """
        assert table.host_block_ids and not table.block_ids, "the table is not swapped out"
        assert match.pool_version == self._pool_version, "the pool changed since the match"
        num_covered = len(table.host_block_ids) * self.block_size
        assert match.num_tokens <= num_covered + 1, "the match looks beyond what is computed"
        assert num_tokens >= match.num_tokens, "a table must cover what is computed"
        needed = self.blocks_needed(match, num_tokens)
        if needed > len(self._free):
            return PoolExhausted(needed, len(self._free))
        self._fill(table, match, num_tokens)
        self.stats.count(match.num_tokens, match.num_cached_tokens, resumed=True)
        host_block_ids, table.host_block_ids = table.host_block_ids, ()
        self._host.release_read(host_block_ids)
        num_hit = len(match.block_ids)
        return self._copied(zip(host_block_ids[num_hit:], table.block_ids[num_hit:], strict=False))

    def seal_batch(self) -> list[int]:
        """The batch being put together is complete: what it copies from can be handed out from now on, in the pool and on the host.
        Returns the blocks for its `zero_blocks`, in the order in which they were handed out: none without `secure_zero`, and none
        that the batch copies whole.

        Called once for each batch issued, after everything that gets or moves blocks in it has been decided.
        """
        self._host.seal()
        while self._copied_from:
            self.free(self._copied_from.pop())
        return self._tenants.take_foreign() if self._tenants is not None else []

    def publish(self, table: BlockTable, token_ids: TokenIds, num_tokens: int, step: int) -> None:
        """Publish the table's full blocks below position `num_tokens` that are not published yet.

        The caller vouches that the first `num_tokens` of `token_ids` are committed and their KV computed, the last of them in the
        output of worker step `step`. Where a digest already stands for other content, publishing stops before that block.
        """
        self._cache.publish(table, token_ids, num_tokens, step)

    def publish_next(
        self, tables: Sequence[BlockTable], nums_full: Sequence[int], token_ids: npt.NDArray[np.int32], step: int
    ) -> int:
        """`publish` for many: of each of these tables so many blocks are full, the last of which, with these ids, is to be published. `token_ids`
        are int32 `[tables, block_size]`.

        Returns of how many tables it is published now. It stops at the first for which it takes `publish`: where more than one block, or the
        first of a sequence, is to be published, or one hashed before, or with a digest known already; or the table publishes nothing.
        """
        return self._cache.publish_next(tables, nums_full, token_ids, step)

    def free(self, table: BlockTable) -> None:
        """Give up all blocks of a table, the tail first, so that the tail is evicted first. An empty table stays empty."""
        if table.host_block_ids:
            self._host.release(table.host_block_ids)
            table.host_block_ids = ()
        if table.block_ids:
            if table.num_published:
                self._cache.recall(table)
            self._release(table.block_ids)
            table.block_ids = array("i")
            table.num_published = 0

    def forget_unused(self) -> int:
        """Forget the content of the free blocks, and return how many were published: what tables hold stays published, and nothing else is
        hit any more. The journal learns it by `take_changes`."""
        self._pool_version += 1
        return self._cache.forget_all(self._free.strip_cached())

    def take_changes(self) -> BlockChanges:
        """What the journal has to learn: the present state of every block published or unpublished since the last call."""
        return self._cache.take_changes()

    def published(self) -> PublishedBlocks:
        """All prefix-cache entries, by block id: what a journal that is rewritten starts from."""
        return self._cache.published()

    def adopt(self, held: Sequence[HeldTable], published: Iterable[PublishedBlock], step: int) -> PublishedBlocks:
        """Take over live tables, swapped ones included, and journalled prefix-cache entries into an unused manager; the rest of the
        pool is free.

        Reference counts and the free list follow from the tables. About a held block its table alone decides: the full computed
        ones are published (as of `step`, the last the worker executed, where no entry names its own), and no other is, because its
        holder may write it any time. Free blocks keep their entries where the prefix is still there; of two for one block the later
        counts. What differs from `published` afterwards is pending in `take_changes`. Returns what `published()` would, in any order.
        """
        assert len(self._free) == self.num_blocks, "only an unused manager adopts"
        blocks = self._blocks
        for item in held:
            for block_id in item.table.block_ids:
                blocks.ref_counts[block_id] += 1
        self._host.refill({block_id for item in held for block_id in item.table.host_block_ids})
        in_pool = [item for item in held if not item.table.host_block_ids]
        told, cached = self._cache.adopt(in_pool, published, step)
        if self._tenants is not None:
            for item in held:
                self._tenants.settle(item.table)
        is_plain = (blocks.ref_counts_view == 0) & ~blocks.is_published_view
        self._free.refill(np.flatnonzero(is_plain).tolist(), cached)
        return told

    def check_integrity(self, tables: Sequence[BlockTable]) -> None:
        """Assert that `tables` (all that hold blocks, of the pool or the host), reference counts, free lists and prefix index tell one
        story."""
        check_pool([*tables, *self._copied_from], self._blocks, self._free)
        self._host.check_integrity([block_id for table in tables for block_id in table.host_block_ids])
        self._cache.check_integrity(tables)

    def _fill(self, table: BlockTable, match: PrefixMatch, num_tokens: int) -> list[int]:
        """Give an empty table the match's blocks, then fresh ones, which are returned; there are as many as `blocks_needed` says."""
        self._free.take_cached(match.free_block_ids)
        ref_counts = self._blocks.ref_counts
        for block_id in match.block_ids:
            ref_counts[block_id] += 1
        fresh = self._take(self.blocks_spanned(num_tokens) - len(match.block_ids), table)
        assert not isinstance(fresh, PoolExhausted), "counted as free"
        table.block_ids = array("i", match.block_ids + fresh)
        table.num_published = len(match.block_ids)
        del table.digests[: table.num_published]
        return fresh

    def _take(self, count: int, table: BlockTable) -> list[int] | PoolExhausted:
        """Hand out `count` free blocks for `table` with one reference each; their cached content is forgotten now. All or nothing."""
        if count > len(self._free):
            return PoolExhausted(count, len(self._free))
        block_ids = self._hand_out(count)
        if self._tenants is not None:
            self._tenants.hand_over(block_ids, table.namespace)
        return block_ids

    def _hand_out(self, count: int) -> list[int]:
        """So many free blocks with one reference each; their cached content is forgotten now."""
        self._pool_version += 1
        block_ids = self._free.take(count)
        ref_counts, is_published = self._blocks.ref_counts, self._blocks.is_published
        for block_id in block_ids:
            ref_counts[block_id] = 1
            if is_published[block_id]:
                self._cache.forget(block_id)
        return block_ids

    def _copied(self, pairs: Iterable[tuple[int, int]], copied_from: Sequence[int] = ()) -> BlockPairs:
        """These pairs. Their targets need no zeroing; their sources, the last of a table's first blocks `copied_from`, are held until
        the batch is sealed, with those before them, so that a prefix is never released before what continues it."""
        listed = list(pairs)
        if listed and copied_from:
            for block_id in copied_from:
                self._blocks.ref_counts[block_id] += 1
            self._copied_from.append(BlockTable(array("i", copied_from)))
        if self._tenants is not None:
            self._tenants.overwritten([target for _, target in listed])
        return listed

    def _release(self, block_ids: Sequence[int]) -> None:
        """Take back one reference of each of these blocks of one table, the last first."""
        self._pool_version += 1
        ref_counts, is_published = self._blocks.ref_counts, self._blocks.is_published
        cached = []
        for block_id in reversed(block_ids):
            count = ref_counts[block_id] - 1
            assert count >= 0, f"block {block_id} is freed more often than held"
            ref_counts[block_id] = count
            if count:
                continue
            if is_published[block_id]:
                cached.append(block_id)
            else:
                self._free.release_plain(block_id)
        self._free.release_cached(cached)

    def _is_shared_or_published(self, block_id: int) -> bool:
        return self._blocks.ref_counts[block_id] > 1 or bool(self._blocks.is_published[block_id])
