"""Many entries of the prefix cache in one array: a pool has hundreds of thousands, and an object each would cost seconds at a takeover."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from kv_manager.published_block import PublishedBlock

Rows = npt.NDArray[np.void]


@cache
def entry_dtype(block_size: int) -> np.dtype[np.void]:
    """One row: an entry of a block of `block_size` tokens, little-endian and packed.

    `step_and_parent` is twice the published step, plus 1 where there is a parent; `parent` is that of the namespace where there is
    none, 0 in the empty one.
    """
    return np.dtype(
        [
            ("block_id", "<u4"),
            ("digest", "<u8"),
            ("parent", "<u8"),
            ("step_and_parent", "<i8"),
            ("token_ids", "<i4", (block_size,)),
        ]
    )


def packed(rows: Rows) -> Rows:
    """The same rows as bytes without fields: numpy copies those seven times faster than it copies structures."""
    return rows.view(_packed_dtype(rows.dtype.itemsize))


@cache
def _packed_dtype(itemsize: int) -> np.dtype[np.void]:
    return np.dtype((np.void, itemsize))


class PublishedBlocks(Sequence[PublishedBlock]):
    """Entries in order, as `rows` of `entry_dtype`. Immutable by agreement: nobody writes into the rows of another.

    Reads as a sequence of `PublishedBlock`, and equals any sequence of the same entries.
    """

    __slots__ = ("rows",)

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    @classmethod
    def of(cls, entries: Iterable[PublishedBlock]) -> "PublishedBlocks":
        """These entries, all of one block size."""
        if isinstance(entries, PublishedBlocks):
            return entries
        listed = list(entries)
        rows: Rows = np.empty(len(listed), entry_dtype(len(listed[0].token_ids) if listed else 0))
        rows["block_id"] = [entry.block_id for entry in listed]
        rows["digest"] = np.array([entry.digest for entry in listed], np.uint64)
        rows["parent"] = np.array([entry.parent or entry.namespace or 0 for entry in listed], np.uint64)
        rows["step_and_parent"] = [2 * entry.published_step + (entry.parent is not None) for entry in listed]
        rows["token_ids"] = [entry.token_ids for entry in listed] if listed else 0
        return cls(rows)

    @classmethod
    def concatenate(cls, parts: Iterable["PublishedBlocks"]) -> "PublishedBlocks":
        """All entries of `parts`, all of one block size, in this order."""
        filled = [part.rows for part in parts if len(part.rows)]
        if len(filled) == 1:
            return cls(filled[0])
        return cls(np.concatenate([packed(rows) for rows in filled]).view(filled[0].dtype)) if filled else NO_BLOCKS

    @property
    def block_ids(self) -> npt.NDArray[np.int64]:
        """Block ids, int64 `[N]`."""
        return self.rows["block_id"].astype(np.int64)

    @property
    def digests(self) -> npt.NDArray[np.uint64]:
        """Chain digests, uint64 `[N]`."""
        digests: npt.NDArray[np.uint64] = self.rows["digest"]
        return digests

    @property
    def published_steps(self) -> npt.NDArray[np.int64]:
        """Worker steps, int64 `[N]`."""
        steps: npt.NDArray[np.int64] = self.rows["step_and_parent"] >> 1
        return steps

    def select(self, index: Any) -> "PublishedBlocks":
        """The entries that a numpy index or mask picks."""
        if isinstance(index, np.ndarray) and index.dtype == np.bool_ and index.all():
            return self  # the usual case at a takeover, of many megabytes
        return PublishedBlocks(packed(self.rows)[index].view(self.rows.dtype))

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> PublishedBlock: ...

    @overload
    def __getitem__(self, index: slice) -> "PublishedBlocks": ...

    def __getitem__(self, index: int | slice) -> "PublishedBlock | PublishedBlocks":
        if isinstance(index, slice):
            return self.select(index)
        (entry,) = self.select([index])
        return entry

    def __iter__(self) -> Iterator[PublishedBlock]:
        rows = self.rows
        columns = (rows[name].tolist() for name in ("block_id", "digest", "parent", "step_and_parent", "token_ids"))
        for block_id, digest, parent, step_and_parent, token_ids in zip(*columns, strict=True):
            step, has_parent = divmod(step_and_parent, 2)
            if has_parent:
                yield PublishedBlock(block_id, digest, parent, tuple(token_ids), step)
            else:
                yield PublishedBlock(block_id, digest, None, tuple(token_ids), step, parent or None)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # equal to tuples, which hash otherwise

    def __repr__(self) -> str:
        return f"PublishedBlocks.of({list(self)!r})"


NO_BLOCKS = PublishedBlocks(np.empty(0, entry_dtype(0)))
