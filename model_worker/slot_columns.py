"""The columns of a slot table as they will be while a batch is applied."""

from dataclasses import dataclass

import numpy as np

from model_worker.slot_table import SlotTable


@dataclass(frozen=True, slots=True, eq=False)
class SlotColumns:
    """Copies of the columns of the same names, changed by each part of a batch as it is checked. `unused_room` int64 `[num_slots]`: by how
    much the batch's `context_lens` are too high."""

    held: np.ndarray
    swapped: np.ndarray
    num_ids: np.ndarray
    computed_lens: np.ndarray
    table_lens: np.ndarray
    unused_room: np.ndarray

    @classmethod
    def of(cls, slots: SlotTable, seen_step: int) -> "SlotColumns":
        """The columns before a batch with this `seen_step`."""
        return cls(
            slots.held.copy(),
            slots.swapped.copy(),
            slots.num_ids.copy(),
            slots.computed_lens.copy(),
            slots.table_lens.copy(),
            slots.unused_room.since(seen_step),
        )
