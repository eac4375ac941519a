"""The prefix cache: which blocks hold the KV of which prefix, and what of that the journal has still to learn."""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kv_manager.adoption import EntriesByBlock, eviction_order, restore_entries
from kv_manager.block import Blocks
from kv_manager.block_table import BlockTable, HeldTable
from kv_manager.hash_chain import TokenIds, chain_digests, namespace_root, next_digests
from kv_manager.prefix_index import HashPrefixIndex, PrefixIndex
from kv_manager.published_block import PublishedBlock
from kv_manager.published_blocks import PublishedBlocks


@dataclass(frozen=True, slots=True)
class BlockChanges:
    """Prefix-cache entries that appeared and went since the last call. Apply `unpublished` first; absolute, so twice is once."""

    published: Sequence[PublishedBlock]
    unpublished: tuple[int, ...]


NO_CHANGES = BlockChanges((), ())


@dataclass(frozen=True, slots=True)
class _Chain:
    """Digests of blocks int32 `[blocks, block_size]` from the first one of a sequence on, behind the root of a namespace."""

    root: int | None
    rows: npt.NDArray[np.int32]
    digests: "array[int]"

    def num_agreeing(self, rows: npt.NDArray[np.int32]) -> int:
        """How many blocks it begins with as these do. Comparing costs a tenth of hashing."""
        count = min(len(rows), len(self.rows))
        differs = (rows[:count] != self.rows[:count]).ravel()
        first = int(differs.argmax())
        return first // rows.shape[1] if differs[first] else count


class PrefixCache:
    """The content of the pool's blocks; who holds them is the block manager's, which alone uses this.

    It writes the content columns of `blocks`, through the index.
    """

    __slots__ = ("_blocks", "_changed", "_index", "_latest", "_namespace", "_root", "is_enabled")

    def __init__(
        self,
        blocks: Blocks,
        namespace: bytes,
        is_enabled: bool,
        new_index: Callable[[Blocks], PrefixIndex] = HashPrefixIndex,
    ) -> None:
        self.is_enabled = is_enabled
        self._blocks = blocks
        self._index = new_index(blocks)
        self._namespace, self._root = namespace, namespace_root(namespace)
        self._changed: set[int] = set()
        self._latest: _Chain | None = None  # the one hashed last from its first block on

    def longest_match(self, table: BlockTable, token_ids: TokenIds) -> list[int]:
        """Blocks of the longest cached prefix that leaves a token to compute. Fills `table.digests`."""
        block_size, num_tokens = self._blocks.block_size, len(token_ids)
        usable = (num_tokens - 1) // block_size
        if usable <= 0 or not self.is_enabled:
            return []
        num_full = num_tokens // block_size
        rows = self._rows(token_ids, 0, num_full)
        self._extend_chain(table, rows[len(table.digests) :])
        return self._index.longest_match(table.digests[:usable], rows[:usable], self._root_of(table))

    def likely_match_len(self, table: BlockTable, token_ids: TokenIds) -> int:
        """How many blocks `longest_match` would find unless digests collide. Fills `table.digests`."""
        block_size = self._blocks.block_size
        usable, num_full = (len(token_ids) - 1) // block_size, len(token_ids) // block_size
        if usable <= 0 or not self.is_enabled:
            return 0
        if len(table.digests) < num_full:
            self._extend_chain(table, self._rows(token_ids, len(table.digests), num_full))
        return self._index.likely_match_len(table.digests[:usable])

    def publish(self, table: BlockTable, token_ids: TokenIds, num_tokens: int, step: int, num_journalled: int = 0) -> None:
        """See `BlockManager.publish`; the journal knows of the first `num_journalled` blocks already."""
        first, stop = table.num_published, num_tokens // self._blocks.block_size
        if stop <= first or not self.is_enabled:
            return
        assert stop <= len(table.block_ids), "more tokens computed than the table covers"
        rows = self._rows(token_ids, first, stop)
        self._extend_chain(table, rows[len(table.digests) :])
        block_ids = table.block_ids[first:stop].tolist()
        count = self._index.insert(self._parent_of(table), block_ids, table.digests[: stop - first], rows, step)
        self._changed.update(block_ids[num_journalled:count])
        table.num_published += count
        del table.digests[:count]

    def publish_next(
        self, tables: Sequence[BlockTable], nums_full: Sequence[int], token_ids: npt.NDArray[np.int32], step: int
    ) -> int:
        """See `BlockManager.publish_next`."""
        if not self.is_enabled:
            return len(tables)
        held_digests = self._blocks.digests
        block_ids, parents = [], []
        for table, num_full in zip(tables, nums_full, strict=True):
            count = table.num_published
            if not count or count != num_full - 1 or table.digests:
                break
            block_ids.append(table.block_ids[count])
            parents.append(held_digests[table.block_ids[count - 1]])
        rows = token_ids[: len(block_ids)]
        num_done = self._index.insert_next(parents, block_ids, next_digests(rows, parents), rows, step) if block_ids else 0
        self._changed.update(block_ids[:num_done])
        for table in tables[:num_done]:
            table.num_published += 1
        return num_done

    def recall(self, table: BlockTable) -> None:
        """A table is about to lose its blocks: it takes the digests of the published ones back, so that nothing is hashed again."""
        block_ids = table.block_ids[: table.num_published]
        table.digests[:0] = array("Q", self._blocks.digests_view[block_ids].tobytes())

    def forget(self, block_id: int) -> None:
        """A published block is handed out: its content goes."""
        self._index.remove(block_id)
        self._changed.add(block_id)

    def forget_all(self, block_ids: Sequence[int]) -> int:
        """Published blocks lose their content, of one prefix the tail first. Returns how many they are."""
        for block_id in block_ids:
            self.forget(block_id)
        return len(block_ids)

    def take_changes(self) -> BlockChanges:
        """The present state of every block published or unpublished since the last call."""
        if not self._changed:
            return NO_CHANGES
        is_published = self._blocks.is_published
        changed = sorted(self._changed)
        self._changed.clear()
        published = self._blocks.published([block_id for block_id in changed if is_published[block_id]])
        return BlockChanges(published, tuple(block_id for block_id in changed if not is_published[block_id]))

    def published(self) -> PublishedBlocks:
        """All entries, by block id."""
        return self._blocks.published(self._blocks.published_ids())

    def adopt(
        self, held: Sequence[HeldTable], published: Iterable[PublishedBlock], step: int
    ) -> tuple[PublishedBlocks, list[int]]:
        """See `BlockManager.adopt`; the reference counts are set already. Returns as well the free blocks with an entry, in the order
        in which they are to be evicted."""
        assert not self._changed, "only an unused cache adopts"
        blocks = self._blocks
        recorded = EntriesByBlock(PublishedBlocks.of(published), blocks.num_blocks)
        is_recalled = np.zeros(blocks.num_blocks, np.bool_)
        for item in held:
            is_recalled[self._adopt_table(item, recorded, step)] = True
        entries = recorded.entries
        holds, free_entries = self._settle_steps(entries, is_recalled[entries.block_ids])
        levels = restore_entries(self._index, blocks, free_entries if self.is_enabled else ())
        cached = eviction_order(levels)
        self._changed.difference_update(cached)
        holds |= np.isin(entries.block_ids, cached)
        new = [block_id for block_id in self._changed if blocks.is_published[block_id]]
        return PublishedBlocks.concatenate([entries.select(holds), blocks.published(new)]), cached

    def check_integrity(self, tables: Sequence[BlockTable]) -> None:
        """Assert that index and columns agree, and that of every table the first `num_published` blocks are published as it says, and no
        other is."""
        for table in tables:
            count = table.num_published if self.is_enabled else 0
            held, written = table.block_ids[:count], table.block_ids[count:]
            assert all(self._blocks.is_published[block_id] for block_id in held), "a table's block is not published"
            digests, links = ([column[block_id] for block_id in held] for column in (self._blocks.digests, self._blocks.links))
            assert links[1:] == digests[:-1], "a published block continues something else than its table says"
            assert not any(self._blocks.is_published[block_id] for block_id in written), (
                "a block is published that its table still writes"
            )
        self._index.check_integrity()

    def _adopt_table(self, held: HeldTable, recorded: EntriesByBlock, step: int) -> npt.NDArray[np.int64]:
        """Publish a live table's computed blocks. Returns those whose entry says the same: their digests are taken from it, not computed."""
        num_full = held.num_computed // self._blocks.block_size
        block_ids = np.array(held.table.block_ids[:num_full], np.int64)
        if self.is_enabled and num_full and not held.table.digests:
            rows, root = self._rows(held.token_ids, 0, num_full), self._root_of(held.table)
            held.table.digests.extend(recorded.digests_of(block_ids, rows, root))
            num_recalled = len(held.table.digests)
        else:
            num_recalled = 0
        self.publish(held.table, held.token_ids, held.num_computed, step, num_recalled)
        return block_ids[: min(num_recalled, held.table.num_published)]

    def _settle_steps(
        self, entries: PublishedBlocks, is_recalled: npt.NDArray[np.bool_]
    ) -> tuple[npt.NDArray[np.bool_], PublishedBlocks]:
        """Of published blocks take the steps that `entries`, one a block, name, where the digests agree; of those recalled they do.

        Returns which agree, and of the others those of free blocks; of everything that disagrees the journal has to learn.
        """
        blocks, agrees = self._blocks, is_recalled.copy()
        others = entries.select(~is_recalled)
        held = others.block_ids
        agrees[~is_recalled] = blocks.is_published_view[held] & (blocks.digests_view[held] == others.digests)
        told = entries.block_ids[agrees]
        blocks.steps_view[told] = 2 * entries.published_steps[agrees] + (blocks.steps_view[told] & 1)
        is_told = np.zeros(blocks.num_blocks, np.bool_)
        is_told[told] = True
        self._changed = {block_id for block_id in self._changed if not is_told[block_id]}
        differing = entries.select(~agrees)
        self._changed.update(differing.block_ids.tolist())
        return agrees, differing.select(blocks.ref_counts_view[differing.block_ids] == 0)

    def _extend_chain(self, table: BlockTable, rows: npt.NDArray[np.int32]) -> None:
        """Hash the blocks that follow those the table has digests of, int32 `[blocks, block_size]`."""
        if not len(rows):
            return
        if table.digests or table.num_published:
            table.digests.extend(chain_digests(rows, table.digests[-1] if table.digests else self._parent_of(table)))
            return
        root = self._root_of(table)
        if self._latest is not None and self._latest.root == root:  # prompts of one kind come together and begin alike
            table.digests = self._latest.digests[: self._latest.num_agreeing(rows)]
        count = len(table.digests)
        table.digests.extend(chain_digests(rows[count:], table.digests[-1] if count else root))
        self._latest = _Chain(root, rows.copy(), table.digests[:])  # a view would keep all that it is a view of

    def _root_of(self, table: BlockTable) -> int | None:
        """What is before the table's first block: the pool's namespace, with the table's own folded in."""
        return namespace_root(self._namespace + table.namespace) if table.namespace else self._root

    def _parent_of(self, table: BlockTable) -> int | None:
        """What is before the first block of a table that is not published: the digest of the last one that is, or the root."""
        if not table.num_published:
            return self._root_of(table)
        return self._blocks.digests[table.block_ids[table.num_published - 1]]

    def _rows(self, token_ids: TokenIds, first: int, stop: int) -> npt.NDArray[np.int32]:
        """Token ids of the sequence's blocks `[first, stop)`, int32 `[stop - first, block_size]`."""
        block_size = self._blocks.block_size
        ids = np.asarray(token_ids[first * block_size : stop * block_size], dtype=np.int32)
        return ids.reshape(stop - first, block_size)
