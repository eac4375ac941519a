"""Whether what a batch swaps, copies and zeroes fits what a worker holds, in the order in which it is done.

What this cannot see is content: that a block named without a pair, or a copy's source, holds what its new owner takes it for.
"""

import numpy as np

from model_worker.slot_columns import SlotColumns
from model_worker.slot_table import SlotTable
from tessera.values.batch import ScheduledBatch, SlotSwap
from tessera.values.model import KVGeometry


class MoveCheck:
    """Goes through one batch's moves, after its drops; brings `columns` to what they will be after the moves."""

    def __init__(self, batch: ScheduledBatch, columns: SlotColumns, slots: SlotTable, geometry: KVGeometry) -> None:
        self._batch = batch
        self._columns = columns
        self._slots = slots
        self._geometry = geometry
        self._swapped_here: set[int] = set()
        # By block: how many tables name it by now, what this batch moves there counted as one more.
        self._users, self._host_users = slots.users.copy(), slots.host_users.copy()
        for slot in np.flatnonzero(slots.held & ~columns.held).tolist():
            np.subtract.at(self._host_users if slots.swapped[slot] else self._users, slots.table(slot), 1)

    def problem(self) -> str:
        """The first thing wrong; empty when nothing is."""
        for swap in self._batch.swap_outs:
            if problem := self._swap_problem(swap, is_in=False) or self._swap_out_problem(swap):
                return f"swap out of slot {swap.slot}: {problem}"
            np.subtract.at(self._users, self._slots.table(swap.slot), 1)
            self._host_users[swap.block_table] += 1
            self._columns.swapped[swap.slot] = True
        if problem := self._copies_problem():
            return f"copies: {problem}"
        for swap in self._batch.swap_ins:
            if problem := self._swap_problem(swap, is_in=True) or self._swap_in_problem(swap):
                return f"swap in of slot {swap.slot}: {problem}"
            self._users[swap.block_table[: self._num_computed(swap.slot)]] += 1
            self._columns.swapped[swap.slot] = False
            self._columns.table_lens[swap.slot] = len(swap.block_table)
        if problem := self._zero_problem():
            return f"zero_blocks: {problem}"
        return ""

    def _num_computed(self, slot: int) -> int:
        """Blocks that hold computed positions of a slot."""
        return -(-int(self._columns.computed_lens[slot]) // self._geometry.block_size)

    def _swap_problem(self, swap: SlotSwap, *, is_in: bool) -> str:
        """What is wrong with a swap whichever way it goes."""
        slot, table = swap.slot, swap.block_table
        num_blocks = self._geometry.num_blocks if is_in else self._geometry.num_host_blocks
        if slot >= self._slots.num_slots:
            return f"the worker has {self._slots.num_slots} slots"
        if not (self._columns.held[slot] and self._slots.holds(slot, swap.request_id, swap.attempt)):
            return f"it is not held by attempt {swap.attempt} of {swap.request_id.hex()}"
        if slot in self._swapped_here:
            return "it is swapped twice"
        self._swapped_here.add(slot)
        if self._columns.swapped[slot] != is_in:
            return f"it is {'not ' * is_in}swapped out"
        if problem := _ids_problem(table, num_blocks):
            return problem
        if len(table) < self._num_computed(slot):
            return f"{len(table)} blocks do not cover {self._columns.computed_lens[slot]} computed positions"
        if len(table) > self._slots.block_tables.shape[1]:
            return f"{len(table)} blocks, a sequence has at most {self._slots.block_tables.shape[1]}"
        return ""

    def _swap_out_problem(self, swap: SlotSwap) -> str:
        table, count = swap.block_table, len(swap.block_table)
        if (taken := self._host_users[table] > 0).any():
            return f"host block {table[taken][0]} is another slot's"
        if count > self._columns.table_lens[swap.slot]:
            return f"{count} blocks, it has {self._columns.table_lens[swap.slot]}"
        if not np.array_equal(swap.pairs, np.stack((self._slots.block_tables[swap.slot, :count], table), axis=1)):
            return f"its pairs are not the {count} first blocks of its table and those of the new one, in order"
        return ""

    def _swap_in_problem(self, swap: SlotSwap) -> str:
        sources, targets = swap.pairs.T
        host_table = self._slots.table(swap.slot)
        places = np.flatnonzero(np.isin(host_table, sources))
        if not (np.array_equal(host_table[places], sources) and np.array_equal(swap.block_table[places], targets)):
            return "its pairs are not places of its table and of the new one, in order"
        if problem := self._use_problem(targets):
            return problem
        if (copied := np.isin(targets, self._batch.copies[:, 0])).any():
            return f"block {targets[copied][0]} is copied by this batch, before it is swapped in"
        return ""

    def _copies_problem(self) -> str:
        """What is wrong with the copies; marks their targets as used."""
        sources, targets = self._batch.copies.T
        num_blocks = self._geometry.num_blocks
        if problem := _ids_problem(targets, num_blocks) or _ids_problem(np.unique(sources), num_blocks):
            return problem
        if (both := np.isin(targets, sources)).any():
            return f"block {targets[both][0]} is a source and a target"
        if problem := self._use_problem(targets):
            return problem
        self._users[targets] += 1
        return ""

    def _use_problem(self, block_ids: np.ndarray) -> str:
        """Blocks that are about to be written must be nobody's."""
        used = self._users[block_ids] > 0
        return f"block {block_ids[used][0]} is in use" if used.any() else ""

    def _zero_problem(self) -> str:
        zeroed = self._batch.zero_blocks
        if problem := _ids_problem(zeroed, self._geometry.num_blocks) or self._use_problem(zeroed):
            return problem
        if len(zeroed):
            for entry in self._batch.entries:
                num_cached = -(-entry.num_cached_tokens // self._geometry.block_size)
                if (cached := np.isin(entry.block_table[:num_cached], zeroed)).any():
                    return (
                        f"block {entry.block_table[:num_cached][cached][0]} is a cached one of the entry into slot {entry.slot}"
                    )
        return ""


def _ids_problem(block_ids: np.ndarray, num_blocks: int) -> str:
    """What is wrong with block ids of which none may come twice."""
    if len(block_ids) and not 0 <= block_ids.min() <= block_ids.max() < num_blocks:
        return f"a block id outside the pool of {num_blocks} blocks"
    if len(np.unique(block_ids)) < len(block_ids):
        return "a block comes twice"
    return ""
