"""How rows are drawn: the parameters of each, as columns."""

from dataclasses import dataclass, fields

import numpy as np

from model_worker.sample_rows import SampleRows

_TEMPERATURE_MIN = 1e-30
"""Below it float32 cannot divide by the temperature; nothing but the maximum has a chance long before."""


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
    def of(cls, rows: SampleRows, some: np.ndarray) -> "Draws":
        """Of some of the rows, by number."""
        table, slots = rows.table, rows.slots[some]
        return cls(
            seeds=table.seeds[slots],
            output_indices=(rows.history_lens[some] - rows.prompt_lens[some]).astype(np.uint64),
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
    def are_filtered(self) -> bool:
        """Whether any row has a filter."""
        return bool(self.top_ks.any() or self.min_ps.any() or self.top_ps.min() < 1)
