"""The batch of one step while it is put together."""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.scheduler.core.sequence import Sequence
from services.scheduler.core.sequence_status import SequenceType
from tessera.values.batch import SlotEntry


@dataclass(frozen=True, slots=True, eq=False)
class IssuedBatch:
    """A batch in flight: which sequence, at which attempt, each row belongs to, and how many tokens each row will sample, int32 `[R]`."""

    step_id: int
    sequences: list[Sequence]
    attempts: list[int]
    counts: list[int]
    samples: npt.NDArray[np.int32]
    num_decodes: int

    @property
    def num_prefill_positions(self) -> int:
        """Positions of all rows that are no decodes."""
        return sum(self.counts[self.num_decodes :])


class StepPlan:
    """Rows chosen so far, decodes first, and the budget left. Adding a row puts its positions in flight."""

    def __init__(self, tokens_max: int, rows_max: int) -> None:
        self.tokens_left = tokens_max
        self.rows_left = rows_max
        self.num_decodes = 0
        self.entries: list[SlotEntry] = []
        self.sequences: list[Sequence] = []
        self.slots: list[int] = []
        self.counts: list[int] = []
        self.context_lens: list[int] = []
        self.new_block_counts: list[int] = []
        self.new_block_ids: list[int] = []
        self._samples: list[int] = []

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self.sequences

    @property
    def is_full(self) -> bool:
        """No budget left for another row."""
        return not (self.tokens_left and self.rows_left)

    def add_decode(self, sequence: Sequence, position: int, new_block_ids: Items[int]) -> None:
        """The next position, which samples. All decodes come before the first prefill."""
        sequence.type = SequenceType.DECODE
        sequence.ledger.positions_in_flight += 1
        self._add(sequence, 1, position + 1, new_block_ids)
        self._samples.append(1)
        self.num_decodes += 1

    def add_prefill(self, sequence: Sequence, count: int, new_block_ids: Items[int] = ()) -> None:
        """A chunk of `count` positions; a sequence that is not in its slot yet enters with it."""
        sequence.type = SequenceType.PREFILL
        if not sequence.has_entered:
            self.entries.append(sequence.enter())
            new_block_ids = ()  # its whole table came with the entry
        samples = sequence.ledger.schedule(count)
        self._add(sequence, count, sequence.ledger.scheduled_len, new_block_ids)
        self._samples.append(int(samples))

    def issued(self, step_id: int) -> IssuedBatch:
        """The rows as they are remembered until their output comes."""
        attempts = [sequence.attempt for sequence in self.sequences]
        return IssuedBatch(step_id, self.sequences, attempts, self.counts, np.array(self._samples, np.int32), self.num_decodes)

    def _add(self, sequence: Sequence, count: int, context_len: int, new_block_ids: Items[int]) -> None:
        assert sequence.slot is not None and count <= self.tokens_left and self.rows_left
        self.sequences.append(sequence)
        self.slots.append(sequence.slot)
        self.counts.append(count)
        self.context_lens.append(context_len)
        self.new_block_counts.append(len(new_block_ids))
        if new_block_ids:
            self.new_block_ids.extend(new_block_ids)
        self.tokens_left -= count
        self.rows_left -= 1
