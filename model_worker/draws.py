"""How rows are drawn: the parameters of each, as columns."""

from dataclasses import dataclass, fields
from enum import IntEnum

import numpy as np

from model_worker.sample_rows import SampleRows

_TEMPERATURE_MIN = 1e-30
"""Below it float32 cannot divide by the temperature; nothing but the maximum has a chance long before."""


class Filter(IntEnum):
    """What the few tokens that a row leaves are found by."""

    NONE = 0
    TOP_K = 1
    TOP_P = 2
    MIN_P = 3


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """Of R rows: columns `[R]` of `SamplingTable`'s names and types, temperatures not below what can be computed with, and
    `output_indices` uint64."""

    seeds: np.ndarray
    output_indices: np.ndarray
    temperatures: np.ndarray
    top_ks: np.ndarray
    top_ps: np.ndarray
    min_ps: np.ndarray

    @classmethod
    def of(cls, rows: SampleRows) -> "Draws":
        """Those of all rows."""
        table, slots = rows.table, rows.slots
        return cls(
            seeds=table.seeds[slots],
            output_indices=rows.output_indices.astype(np.uint64),
            temperatures=np.maximum(table.temperatures[slots], _TEMPERATURE_MIN),
            top_ks=table.top_ks[slots],
            top_ps=table.top_ps[slots],
            min_ps=table.min_ps[slots],
        )

    @classmethod
    def joined(cls, parts: "list[Draws]") -> "Draws":
        """The rows of all, one after the other."""
        return cls(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    def only(self, rows: np.ndarray) -> "Draws":
        """Some of the rows, by number."""
        return Draws(*(getattr(self, field.name)[rows] for field in fields(self)))

    @property
    def filters(self) -> np.ndarray:
        """The `Filter` of each row, int64 `[R]`."""
        return np.select(
            [self.top_ks > 0, self.top_ps < 1, self.min_ps > 0], [Filter.TOP_K, Filter.TOP_P, Filter.MIN_P], Filter.NONE
        )
