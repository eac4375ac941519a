"""Sequences in lanes, as the rows of batches."""

from array import array
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.scheduler.core.lanes import Lanes
from services.scheduler.core.sequence import JournalCursor, Sequence


@dataclass(frozen=True, slots=True, eq=False)
class LaneRows:
    """Sequences that held lanes at `version`, in order of rank, with what every step needs of each; shared by all batches of these rows."""

    lanes: Lanes
    version: int
    sequences: list[Sequence]
    attempts: list[int]
    request_ids: tuple[bytes, ...]
    slots: npt.NDArray[np.int32]  # [R]
    outputs: "list[array[int]]"  # the sequences' own
    cursors: list[JournalCursor]  # likewise

    @classmethod
    def of(cls, lanes: Lanes, held: list[Sequence]) -> "LaneRows":
        """These sequences, each of which holds a lane."""
        return cls(
            lanes,
            lanes.version,
            held,
            [sequence.attempt for sequence in held],
            tuple([sequence.request_id for sequence in held]),
            np.array([sequence.slot for sequence in held], np.int32),
            [sequence.ledger.token_ids.output for sequence in held],
            [sequence.cursor for sequence in held],
        )

    def only(self, rows: list[int]) -> "LaneRows":
        """Some of these rows."""
        return LaneRows(
            self.lanes,
            self.version,
            [self.sequences[row] for row in rows],
            [self.attempts[row] for row in rows],
            tuple([self.request_ids[row] for row in rows]),
            self.slots[rows],
            [self.outputs[row] for row in rows],
            [self.cursors[row] for row in rows],
        )

    def still_held(self) -> list[int] | None:
        """The rows whose sequences are in the lane and attempt in which they were; None: all of them."""
        if self.version == self.lanes.version:
            return None
        rows = [
            row
            for row, (sequence, attempt) in enumerate(zip(self.sequences, self.attempts, strict=True))
            if sequence.ledger.lanes is self.lanes and sequence.attempt == attempt
        ]
        return rows if len(rows) < len(self.sequences) else None

    def __len__(self) -> int:
        return len(self.sequences)
