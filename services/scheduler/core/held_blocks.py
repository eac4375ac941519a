"""Which prefix-cache entries a worker's memory holds, whatever its scheduler had written down of them."""

from array import array
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kv_manager.adoption import EntriesByBlock, table_entries
from kv_manager.block_table import BlockTable, HeldTable
from kv_manager.hash_chain import join_namespace, namespace_root
from kv_manager.published_block import PublishedBlock
from kv_manager.published_blocks import NO_BLOCKS, PublishedBlocks
from tessera.values.model import WorkerDescription
from tessera.values.report import DroppedSlot, SlotReport, WorkerReport


def kv_namespace(description: WorkerDescription) -> bytes:
    """What KV must agree on to be shared: the weights that made it and the format it lies in."""
    return join_namespace(description.model.weights_digest, description.geometry.kv_format)


def table_namespace(cache_salt: str) -> bytes:
    """What a table's KV must agree on to be shared beside that: the tenant's salt. Without one anybody shares it."""
    return join_namespace(cache_salt) if cache_salt else b""


def held_blocks(report: WorkerReport, recorded: Iterable[PublishedBlock]) -> PublishedBlocks:
    """At most one entry a block: recorded ones (of this boot) that nothing wrote since, and every full computed block of a reported
    slot, live, finished or dropped, as of the step that wrote it. One that is swapped out has none in the pool.

    A dropped slot's block counts only if its last write came before the step that dropped it.
    """
    told = PublishedBlocks.of(recorded)
    kept = told.select(report.last_write_step[told.block_ids] <= told.published_steps)
    by_block = EntriesByBlock(kept, report.description.geometry.num_blocks)
    told_blocks = np.zeros(report.description.geometry.num_blocks, np.bool_)
    told_blocks[kept.block_ids] = True
    parts = [by_block.entries]
    lens: list[tuple[SlotReport | DroppedSlot, int]] = [
        (slot, slot.computed_len) for slot in report.slots if not slot.is_swapped
    ]
    lens += [(dropped, _untouched_len(report, dropped)) for dropped in report.dropped]
    for slot, num_computed in lens:
        parts.append(_untold(report, slot, num_computed, by_block, told_blocks))
        told_blocks[parts[-1].block_ids] = True
    return PublishedBlocks.concatenate(parts)


def _untouched_len(report: WorkerReport, dropped: DroppedSlot) -> int:
    """Computed positions of a dropped slot before the first block that may have been written since."""
    block_size = report.description.geometry.block_size
    num_full = dropped.computed_len // block_size
    for index, block_id in enumerate(dropped.block_table[:num_full].tolist()):
        if report.last_write_step[block_id] >= dropped.drop_step:
            return index * block_size
    return num_full * block_size


def _untold(
    report: WorkerReport,
    slot: SlotReport | DroppedSlot,
    num_computed: int,
    by_block: EntriesByBlock,
    told_blocks: npt.NDArray[np.bool_],
) -> PublishedBlocks:
    """Entries of a slot's full computed blocks that nothing told before."""
    block_size = report.description.geometry.block_size
    num_full = num_computed // block_size
    block_ids = slot.block_table[:num_full]
    fresh = ~told_blocks[block_ids]
    if not fresh.any():
        return NO_BLOCKS
    rows = slot.token_ids[: num_full * block_size].reshape(num_full, block_size)
    namespace, own = kv_namespace(report.description), table_namespace(slot.cache_salt)
    digests = by_block.digests_of(block_ids, rows, namespace_root(namespace + own))
    table = BlockTable(array("i", slot.block_table.tolist()), digests=array("Q", digests), namespace=own)
    held = HeldTable(table, slot.token_ids, num_computed)
    return table_entries(held, block_size, namespace, report.last_write_step).select(fresh)
