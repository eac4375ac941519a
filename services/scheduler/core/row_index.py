"""Which rows of columns: as numpy moves them fastest."""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Index: TypeAlias = "slice | npt.NDArray[Any]"
"""Some rows, by their numbers; a slice where they follow each other."""

Rows: TypeAlias = npt.NDArray[np.intp]
"""Numbers of rows, ascending."""


def as_slice(rows: npt.NDArray[Any]) -> Index:
    """The same rows as a slice where they follow each other: numpy moves those in a fifth of the time."""
    if len(rows) and (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


def rows_of(mask: npt.NDArray[np.bool_]) -> list[int]:
    """The rows in which a mask is true; for the usual case that there are none as cheap as can be."""
    return mask.nonzero()[0].tolist() if 1 in mask.tobytes() else []
