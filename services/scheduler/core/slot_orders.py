"""What a worker is told of its slots beside rows, and the tables of the slots that it reports."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kv_manager.allocation import BlockPairs
from kv_manager.block_table import BlockTable
from services.scheduler.core.held_blocks import table_namespace
from services.scheduler.core.sequence import Sequence
from tessera.values.batch import SlotDrop, SlotSwap
from tessera.values.finish import Finish
from tessera.values.report import SlotReport


@dataclass(frozen=True, slots=True)
class Orphan:
    """A live slot that no known request owns yet; its blocks are held for one that may come."""

    slot: SlotReport
    table: BlockTable


def reported_table(slot: SlotReport) -> BlockTable:
    """The table of a slot that nobody owns yet."""
    block_ids, namespace = slot.block_table.tolist(), table_namespace(slot.cache_salt)
    if slot.is_swapped:
        return BlockTable(host_block_ids=tuple(block_ids), namespace=namespace)
    return BlockTable(array("i", block_ids), namespace=namespace)


def slot_drop(sequence: Sequence, finish: Finish | None) -> SlotDrop:
    """The worker is to give up a sequence's slot."""
    assert sequence.slot is not None
    return SlotDrop(sequence.slot, sequence.request_id, sequence.attempt, finish)


def slot_swap(sequence: Sequence, block_ids: Iterable[int], pairs: BlockPairs) -> SlotSwap:
    """A slot's new table, and what is copied for it."""
    assert sequence.slot is not None
    table, columns = np.fromiter(block_ids, np.int32), np.array(pairs, np.int32).reshape(-1, 2)
    return SlotSwap(sequence.slot, sequence.request_id, sequence.attempt, table, columns)
