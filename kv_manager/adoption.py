"""Prefix-cache entries across a change of scheduler: what a reported table stands for, what of the journal can be hit again."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kv_manager.block import Blocks
from kv_manager.block_table import HeldTable
from kv_manager.hash_chain import chain_digests, namespace_link
from kv_manager.prefix_index import PrefixIndex
from kv_manager.published_block import PublishedBlock


def table_entries(
    held: HeldTable, block_size: int, namespace: bytes, last_write_steps: Sequence[int] | npt.NDArray[np.int64]
) -> list[PublishedBlock]:
    """Entries of the full computed blocks of a table, published as of the step that last wrote each (indexed by block id).

    For tables that nobody adopts but whose KV is still there; the caller has cut `num_computed` before the first overwritten block.
    """
    num_full = held.num_computed // block_size
    rows = np.asarray(held.token_ids[: num_full * block_size], np.int32).reshape(num_full, block_size)
    digests = chain_digests(rows, namespace_link(namespace))
    parents = [None, *digests][:num_full]
    columns = zip(held.table.block_ids[:num_full], digests, parents, rows.tolist(), strict=True)
    return [
        PublishedBlock(block_id, digest, parent, tuple(row), int(last_write_steps[block_id]))
        for block_id, digest, parent, row in columns
    ]


def restore_entries(index: PrefixIndex, blocks: Blocks, entries: Iterable[PublishedBlock]) -> list[list[PublishedBlock]]:
    """Publish entries of free blocks that continue what is published, and what continues those, and so on.

    At most one entry a block. Returns the published ones grouped by that depth. The rest can never be hit: its prefix is gone, or
    its digest stands for other content. Unlike a hit, this knows an entry's prefix by its 64-bit digest alone.
    """
    children: defaultdict[int | None, list[PublishedBlock]] = defaultdict(list)
    for entry in entries:
        children[entry.parent].append(entry)
    levels: list[list[PublishedBlock]] = []
    parents: list[int | None] = [None, *{digest for digest in blocks.digests if digest is not None}]
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
    row = np.array([entry.token_ids], np.int32)
    return index.insert(entry.parent, [entry.block_id], [entry.digest], row, entry.published_step) == 1
