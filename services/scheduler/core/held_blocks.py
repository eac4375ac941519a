"""Which prefix-cache entries a worker's memory holds, whatever its scheduler had written down of them."""

from collections.abc import Iterable

from kv_manager.adoption import table_entries
from kv_manager.block_table import BlockTable, HeldTable
from kv_manager.hash_chain import join_namespace
from kv_manager.published_block import PublishedBlock
from tessera.values.model import WorkerDescription
from tessera.values.report import DroppedSlot, SlotReport, WorkerReport


def kv_namespace(description: WorkerDescription) -> bytes:
    """What KV must agree on to be shared: the weights that made it and the format it lies in."""
    return join_namespace(description.model.weights_digest, description.geometry.kv_format)


def held_blocks(report: WorkerReport, recorded: Iterable[PublishedBlock]) -> tuple[PublishedBlock, ...]:
    """At most one entry a block: recorded ones (of this boot) that nothing wrote since, and every full computed block of a reported
    slot, live, finished or dropped, as of the step that wrote it.

    A dropped slot's block counts only if its last write came before the step that dropped it.
    """
    last_write_step = report.last_write_step
    entries = {entry.block_id: entry for entry in recorded if last_write_step[entry.block_id] <= entry.published_step}
    for slot in report.slots:
        _add(entries, report, slot, slot.computed_len)
    for dropped in report.dropped:
        _add(entries, report, dropped, _untouched_len(report, dropped))
    return tuple(entries.values())


def _untouched_len(report: WorkerReport, dropped: DroppedSlot) -> int:
    """Computed positions of a dropped slot before the first block that may have been written since."""
    block_size = report.description.geometry.block_size
    num_full = dropped.computed_len // block_size
    for index, block_id in enumerate(dropped.block_table[:num_full].tolist()):
        if report.last_write_step[block_id] >= dropped.drop_step:
            return index * block_size
    return num_full * block_size


def _add(entries: dict[int, PublishedBlock], report: WorkerReport, slot: SlotReport | DroppedSlot, num_computed: int) -> None:
    held = HeldTable(BlockTable(slot.block_table.tolist()), slot.token_ids, num_computed)
    description = report.description
    found = table_entries(held, description.geometry.block_size, kv_namespace(description), report.last_write_step)
    for entry in found:
        entries.setdefault(entry.block_id, entry)
