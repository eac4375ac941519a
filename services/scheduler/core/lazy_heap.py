"""A queue in order of keys, out of which anything can be taken cheaply."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

Item = TypeVar("Item")

GARBAGE_MIN = 64
"""Below so many entries of items that are gone it is never rebuilt."""


class LazyHeap(Generic[Item]):
    """Items by name, each with a key that does not change; the lowest key is first. No two entries ever have the same key and serial.

    A binary heap. Taking an item out leaves its entry, unless that is on top; when most entries are such, the heap is built anew from the
    others. So each operation is O(log n), over many of them, and looking at the first one O(1).
    """

    __slots__ = ("_entries", "_heap", "_serial")

    def __init__(self) -> None:
        self._entries: dict[bytes, tuple[tuple[int, ...], int, Item]] = {}
        self._heap: list[tuple[tuple[int, ...], int, bytes]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Item]:
        """All items, in no order."""
        return (item for _, _, item in self._entries.values())

    def __contains__(self, name: bytes) -> bool:
        return name in self._entries

    def add(self, name: bytes, key: tuple[int, ...], item: Item) -> None:
        """Put in an item under a name that is not in use. Of equal keys the one added first comes first."""
        assert name not in self._entries
        self._serial += 1
        self._entries[name] = key, self._serial, item
        heappush(self._heap, (key, self._serial, name))

    def take(self, name: bytes) -> Item:
        """Take an item out, wherever it stands; KeyError where there is none of this name."""
        _, _, item = self._entries.pop(name)
        heap, entries = self._heap, self._entries
        while heap and not self._is_live(heap[0]):
            heappop(heap)
        if len(heap) > 2 * len(entries) + GARBAGE_MIN:
            self._heap = [(key, serial, other) for other, (key, serial, _) in entries.items()]
            heapify(self._heap)
        return item

    def first(self) -> Item | None:
        """The item with the lowest key; it stays."""
        return self._entries[self._heap[0][2]][2] if self._heap else None

    def check_integrity(self) -> None:
        """Assert that every item has its entry in the heap, once."""
        live = sorted((key, serial, name) for name, (key, serial, _) in self._entries.items())
        assert sorted(entry for entry in self._heap if self._is_live(entry)) == live, "an item has no entry, or two"
        assert all(self._heap[(index - 1) // 2] <= entry for index, entry in enumerate(self._heap) if index), "not a heap"
        assert not self._heap or self._is_live(self._heap[0]), "what is gone is on top"

    def _is_live(self, entry: tuple[tuple[int, ...], int, bytes]) -> bool:
        held = self._entries.get(entry[2])
        return held is not None and held[1] == entry[1]
