"""The queue of waiting sequences, in one order (`queue_order`)."""

from collections.abc import Iterator
from dataclasses import dataclass

from services.scheduler.core.lazy_heap import LazyHeap
from services.scheduler.core.queue_order import Rank, waiting_rank
from services.scheduler.core.sequence import Sequence


@dataclass(slots=True)
class _Place:
    sequence: Sequence
    rank: Rank  # lower comes first
    worker: str = ""  # in whose line; empty where anybody may take it
    num_blocks: int = 0  # that the worker keeps free for it
    awaited: bytes = b""  # the request that it waits for, aside; empty where it waits for its turn


class WaitingQueue:
    """Sequences without blocks, in one order. Neither tokens nor rank of a queued sequence may change.

    Some of the foremost stand in the line of a worker: it takes them as soon as it puts its next batch together, and nobody else does.
    Nobody is skipped for lack of room: a head that fits nowhere yet holds up those behind it, so that it gets the blocks which running
    sequences give up. A running sequence is not sent away for one that waits, of whatever priority.

    Others stand aside until the prompt of another request is computed (`set_aside`): nobody waits behind them.

    Looking at the head, adding, and taking out from anywhere cost O(log n).
    """

    __slots__ = ("_aside", "_by_age", "_lines", "_open", "_places", "_rank_of", "num_tokens")

    def __init__(self, order: str = "fcfs") -> None:
        self._rank_of = waiting_rank(order)
        self._places: dict[bytes, _Place] = {}
        self._open: LazyHeap[_Place] = LazyHeap()  # in nobody's line
        self._lines: dict[str, LazyHeap[_Place]] = {}
        self._aside: dict[bytes, dict[bytes, _Place]] = {}  # by the request that they wait for
        self._by_age: LazyHeap[Sequence] = LazyHeap()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Sequence]:
        """All of them, in no order."""
        return (place.sequence for place in self._places.values())

    def __contains__(self, sequence: Sequence) -> bool:
        place = self._places.get(sequence.request_id)
        return place is not None and place.sequence is sequence

    @property
    def oldest(self) -> Sequence | None:
        """Who came first of all that wait, wherever it stands."""
        return self._by_age.first()

    def push(self, sequence: Sequence) -> None:
        """Queue a sequence at its place in the order."""
        request_id = sequence.request_id
        assert request_id not in self._places
        place = self._places[request_id] = _Place(sequence, self._rank_of(sequence))
        self._open.add(request_id, place.rank, place)
        self._by_age.add(request_id, (sequence.arrived_us,), sequence)
        self.num_tokens += sequence.ledger.num_tokens

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands."""
        place = self._places.pop(sequence.request_id)
        if place.awaited:
            del self._aside[place.awaited][sequence.request_id]
        else:
            (self._lines[place.worker] if place.worker else self._open).take(sequence.request_id)
        self._by_age.take(sequence.request_id)
        self.num_tokens -= sequence.ledger.num_tokens

    # -- aside

    @property
    def awaited(self) -> list[bytes]:
        """The requests that some wait for, aside."""
        return list(self._aside)

    def set_aside(self, sequence: Sequence, awaited: bytes) -> None:
        """Let a sequence that stands in no line wait for another request, at its place in the order, but passed by whoever is behind it."""
        place = self._open.take(sequence.request_id)
        place.awaited = awaited
        self._aside.setdefault(awaited, {})[sequence.request_id] = place

    def bring_back(self, awaited: bytes) -> None:
        """Who waits for this request waits for its turn again."""
        for place in self._aside.pop(awaited).values():
            place.awaited = b""
            self._open.add(place.sequence.request_id, place.rank, place)

    # -- lines

    def first_for(self, worker: str) -> Sequence | None:
        """The foremost sequence that a worker may take: in its line, or in nobody's."""
        line = self._lines.get(worker)
        foremost, other = self._open.first(), line.first() if line is not None else None
        if foremost is None or (other is not None and other.rank < foremost.rank):
            foremost = other
        return foremost.sequence if foremost is not None else None

    def stands_in_line(self, sequence: Sequence) -> bool:
        """Whether a sequence stands in a worker's line."""
        return bool(self._places[sequence.request_id].worker)

    def send(self, sequence: Sequence, worker: str, num_blocks: int) -> None:
        """Put a sequence into a worker's line, which is to keep `num_blocks` free for it."""
        place = self._open.take(sequence.request_id)
        place.worker, place.num_blocks = worker, num_blocks
        self._lines.setdefault(worker, LazyHeap()).add(sequence.request_id, place.rank, place)

    def ahead_of(self, sequence: Sequence, worker: str) -> tuple[int, int]:
        """How many stand before a sequence in a worker's line, whether it does or not, and how many blocks are kept free for them."""
        line = self._lines.get(worker)
        if not line:
            return 0, 0
        rank = self._places[sequence.request_id].rank
        ahead = [place.num_blocks for place in line if place.rank < rank]
        return len(ahead), sum(ahead)

    def dissolve(self, worker: str) -> None:
        """Nobody stands in this worker's line any more; everybody keeps his place in the order."""
        for place in self._lines.pop(worker, ()):
            place.worker, place.num_blocks = "", 0
            self._open.add(place.sequence.request_id, place.rank, place)

    def dissolve_all(self) -> None:
        """Nobody stands in any line any more."""
        for worker in list(self._lines):
            self.dissolve(worker)

    def check_integrity(self) -> None:
        """Assert that lines, order and counts tell one story."""
        heaps = {"": self._open, **self._lines}
        for worker, heap in heaps.items():
            heap.check_integrity()
            assert all(self._places[place.sequence.request_id] is place and place.worker == worker for place in heap)
        for awaited, places in self._aside.items():
            assert all(self._places[name] is place and place.awaited == awaited for name, place in places.items())
        num_aside = sum(map(len, self._aside.values()))
        assert num_aside + sum(map(len, heaps.values())) == len(self._places) == len(self._by_age)
        self._by_age.check_integrity()
        assert all(place.rank == self._rank_of(place.sequence) for place in self._places.values()), (
            "a rank changed in the queue"
        )
        assert self.num_tokens == sum(sequence.ledger.num_tokens for sequence in self)
