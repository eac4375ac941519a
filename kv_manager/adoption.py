"""Prefix-cache entries across a change of scheduler: what a reported table stands for, what of the journal can be hit again."""

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kv_manager.block import Blocks
from kv_manager.block_table import HeldTable
from kv_manager.hash_chain import chain_digests, namespace_root
from kv_manager.prefix_index import PrefixIndex
from kv_manager.published_block import PublishedBlock
from kv_manager.published_blocks import PublishedBlocks, Rows, entry_dtype


class EntriesByBlock:
    """Entries that can be asked for by block id, of a pool of `num_blocks`; of two for one block the later counts."""

    def __init__(self, entries: PublishedBlocks, num_blocks: int) -> None:
        self._row_of = np.full(num_blocks, -1, np.int64)
        self._row_of[entries.block_ids] = np.arange(len(entries))
        self._entries = entries

    @property
    def entries(self) -> PublishedBlocks:
        """One a block."""
        used = self._row_of[self._row_of >= 0]
        return self._entries if len(used) == len(self._entries) else self._entries.select(np.sort(used))

    def digests_of(self, block_ids: npt.NDArray[np.integer], rows: npt.NDArray[np.int32], root: int | None) -> list[int]:
        """Digests of the first of these consecutive blocks, from the first one of a sequence on whose namespace has this root: as far as
        each has an entry with the same ids, int32 `[blocks, block_size]`, that continues the one before. Comparing costs a tenth of
        hashing."""
        picked = self._row_of[block_ids]
        found = self._entries.rows[picked[: _count(picked >= 0)]]
        if not len(found):
            return []
        agrees = (found["token_ids"] == rows[: len(found)]).all(axis=1)
        digests, has_parent = found["digest"], found["step_and_parent"] & 1
        agrees[0] &= not has_parent[0] and int(found["parent"][0]) == (0 if root is None else ~root)
        agrees[1:] &= (has_parent[1:] == 1) & (found["parent"][1:] == digests[:-1])
        known: list[int] = digests[: _count(agrees)].tolist()
        return known


def _count(holds: npt.NDArray[np.bool_]) -> int:
    """How many hold before the first that does not."""
    return len(holds) if holds.all() else int(holds.argmin())


def table_entries(
    held: HeldTable, block_size: int, namespace: bytes, last_write_steps: npt.NDArray[np.int64]
) -> PublishedBlocks:
    """Entries of the full computed blocks of a table, published as of the step that last wrote each (indexed by block id).

    For tables that nobody adopts but whose KV is still there; the caller has cut `num_computed` before the first overwritten block.
    `namespace` is the pool's.
    Digests that the table knows are not computed again; it learns the others.
    """
    num_full = held.num_computed // block_size
    ids = np.asarray(held.token_ids[: num_full * block_size], np.int32).reshape(num_full, block_size)
    digests, root = held.table.digests, namespace_root(namespace + held.table.namespace)
    if len(digests) < num_full:
        digests.extend(chain_digests(ids[len(digests) :], digests[-1] if digests else root))
    block_ids = np.array(held.table.block_ids[:num_full], np.int64)
    rows: Rows = np.empty(num_full, entry_dtype(block_size))
    rows["block_id"] = block_ids
    rows["digest"] = np.array(digests[:num_full], np.uint64)
    rows["parent"][:1] = 0 if root is None else ~root
    rows["parent"][1:] = rows["digest"][:-1]
    rows["step_and_parent"] = 2 * last_write_steps[block_ids] + 1
    rows["step_and_parent"][:1] -= 1
    rows["token_ids"] = ids
    return PublishedBlocks(rows)


def restore_entries(index: PrefixIndex, blocks: Blocks, entries: Iterable[PublishedBlock]) -> list[list[PublishedBlock]]:
    """Publish entries of free blocks that continue what is published, and what continues those, and so on.

    At most one entry a block. Returns the published ones grouped by that depth. The rest can never be hit: its prefix is gone, or
    its digest stands for other content. Unlike a hit, this knows an entry's prefix by its 64-bit digest alone.
    """
    children: defaultdict[int | None, list[PublishedBlock]] = defaultdict(list)
    for entry in entries:
        children[entry.parent].append(entry)
    levels: list[list[PublishedBlock]] = []
    parents: list[int | None] = [None, *(children.keys() & blocks.digests_view[blocks.published_ids()].tolist())]
    while parents:
        level = [entry for parent in parents for entry in children.pop(parent, ()) if _restore(index, entry)]
        levels.append(level)
        parents = list(dict.fromkeys(entry.digest for entry in level))
    return levels


def eviction_order(levels: list[list[PublishedBlock]]) -> list[int]:
    """Block ids of restored entries, first to be evicted first.

    When they were released is not recorded; the latest step in which an entry or a continuation of it was completed stands in
    for it. Of one prefix the tail goes first, as if a sequence had freed it.
    """
    last_use: dict[int | None, int] = {}
    for level in reversed(levels):
        for entry in level:
            last_use[entry.digest] = max(entry.published_step, last_use.get(entry.digest, 0))
        for entry in level:
            last_use[entry.parent] = max(last_use[entry.digest], last_use.get(entry.parent, 0))
    ranks = [(last_use[entry.digest], -depth, entry.block_id) for depth, level in enumerate(levels) for entry in level]
    return [block_id for _, _, block_id in sorted(ranks)]


def _restore(index: PrefixIndex, entry: PublishedBlock) -> bool:
    row, parent = np.array([entry.token_ids], np.int32), entry.parent
    if parent is None and entry.namespace is not None:
        parent = ~entry.namespace
    return index.insert(parent, [entry.block_id], [entry.digest], row, entry.published_step) == 1
