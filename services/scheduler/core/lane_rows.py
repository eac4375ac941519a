"""Sequences in lanes, as the rows of batches."""

from array import array
from dataclasses import dataclass

import numpy as np

from kv_manager.block_table import BlockTable
from services.scheduler.core.lanes import Column, Lanes
from services.scheduler.core.row_index import Index, as_slice
from services.scheduler.core.sequence import Sequence


@dataclass(frozen=True, slots=True, eq=False)
class LaneRows:
    """Sequences that held lanes at `version`, with what every step needs of each; shared by all batches of these rows, and read only."""

    lanes: Lanes
    version: int
    sequences: list[Sequence]
    attempts: list[int]
    request_ids: tuple[bytes, ...]
    slots: Column  # [R]
    index: Index  # the same
    ones: Column  # [R]
    outputs: "list[array[int]]"  # the sequences' own
    tables: list[BlockTable]  # likewise

    @classmethod
    def of(cls, lanes: Lanes, held: list[Sequence]) -> "LaneRows":
        """These sequences, each of which holds a lane."""
        slots = np.array([sequence.slot for sequence in held], np.int32)
        return cls(
            lanes,
            lanes.version,
            held,
            [sequence.attempt for sequence in held],
            tuple([sequence.request_id for sequence in held]),
            slots,
            as_slice(slots),
            np.ones(len(held), np.int32),
            [sequence.ledger.token_ids.output for sequence in held],
            [sequence.table for sequence in held],
        )

    def only(self, rows: list[int]) -> "LaneRows":
        """Some of these rows."""
        slots = self.slots[rows]
        return LaneRows(
            self.lanes,
            self.version,
            [self.sequences[row] for row in rows],
            [self.attempts[row] for row in rows],
            tuple([self.request_ids[row] for row in rows]),
            slots,
            as_slice(slots),
            self.ones[: len(rows)],
            [self.outputs[row] for row in rows],
            [self.tables[row] for row in rows],
        )

    def without(self, rows: set[int]) -> "LaneRows":
        """All but some rows."""
        return self.only([row for row in range(len(self)) if row not in rows])

    def left(self) -> set[int]:
        """The rows whose sequences are no longer in the lane and attempt in which they were."""
        if self.version == self.lanes.version:
            return set()
        return {
            row
            for row, (sequence, attempt) in enumerate(zip(self.sequences, self.attempts, strict=True))
            if sequence.ledger.lanes is not self.lanes or sequence.attempt != attempt
        }

    def __len__(self) -> int:
        return len(self.sequences)
