"""The numbers of rows for which decode batches are recorded."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from tessera.values.config import ConfigError

LARGEST = 256
"""Of the sizes that are recorded without being asked for: larger batches keep a GPU busy without a graph."""

STEP = 8
"""From here on a batch is padded by less than this many rows."""


@dataclass(frozen=True, slots=True)
class PaddedSizes:
    """`sizes`: numbers of rows, ascending; none: nothing is recorded."""

    sizes: tuple[int, ...]

    @classmethod
    def usual(cls, max_num_seqs: int) -> "PaddedSizes":
        """1, 2, 4, then every multiple of 8 up to LARGEST; none is larger than is needed for `max_num_seqs` rows."""
        sizes = [1, 2, 4, *range(STEP, LARGEST + 1, STEP)]
        return cls(tuple(sizes[: bisect_left(sizes, max_num_seqs) + 1]))

    @classmethod
    def given(cls, sizes: Sequence[int], max_num_seqs: int) -> "PaddedSizes":
        """Those that somebody has chosen. Raises ConfigError."""
        if not all(1 <= size <= max_num_seqs for size in sizes):
            raise ConfigError(
                f"graph_sizes must be from 1 to max_num_seqs ({max_num_seqs}), got {', '.join(map(str, sizes))}: no batch has more rows"
            )
        return cls(tuple(sorted(set(sizes))))

    def within(self, largest: int) -> "PaddedSizes":
        """Those that are not larger."""
        return PaddedSizes(tuple(size for size in self.sizes if size <= largest))

    def holding(self, rows: int) -> int | None:
        """The smallest size that holds so many rows; None: there is none."""
        index = bisect_left(self.sizes, rows)
        return self.sizes[index] if index < len(self.sizes) else None
