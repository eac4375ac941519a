"""The queue of waiting sequences: first come, first served; a preempted one goes back to the head."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from services.scheduler.core.sequence import Sequence


@dataclass(slots=True)
class _Place:
    sequence: Sequence
    number: int  # lower comes first
    worker: str = ""  # in whose line; empty where anybody may take it
    num_blocks: int = 0  # that the worker keeps free for it


class WaitingQueue:
    """Sequences without blocks, in one order. Tokens of a queued sequence must not change.

    Some of the foremost stand in the line of a worker: it takes them as soon as it puts its next batch together, and nobody else does.
    Nobody is skipped for lack of room: a head that fits nowhere yet holds up those behind it, so that it gets the blocks which running
    sequences give up.
    """

    __slots__ = ("_first_number", "_last_number", "_lines", "_open", "_places", "num_tokens")

    def __init__(self) -> None:
        self._places: dict[bytes, _Place] = {}
        self._open: OrderedDict[bytes, _Place] = OrderedDict()  # in nobody's line, by number
        self._lines: dict[str, OrderedDict[bytes, _Place]] = {}
        self._first_number = self._last_number = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Sequence]:
        return (place.sequence for place in self._places.values())

    def __contains__(self, sequence: Sequence) -> bool:
        place = self._places.get(sequence.request_id)
        return place is not None and place.sequence is sequence

    def push(self, sequence: Sequence) -> None:
        """Queue a new sequence at the tail."""
        self._last_number += 1
        self._add(_Place(sequence, self._last_number))

    def push_front(self, sequence: Sequence) -> None:
        """Queue a sequence that ran already at the head."""
        self._first_number -= 1
        self._add(_Place(sequence, self._first_number))
        self._open.move_to_end(sequence.request_id, last=False)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands."""
        place = self._places.pop(sequence.request_id)
        (self._lines[place.worker] if place.worker else self._open).pop(sequence.request_id)
        self.num_tokens -= sequence.ledger.num_tokens

    # -- lines

    def first_for(self, worker: str) -> Sequence | None:
        """The foremost sequence that a worker may take: in its line, or in nobody's."""
        heads = [next(iter(line.values())) for line in (self._lines.get(worker), self._open) if line]
        return min(heads, key=lambda place: place.number).sequence if heads else None

    def stands_in_line(self, sequence: Sequence) -> bool:
        """Whether a sequence stands in a worker's line."""
        return bool(self._places[sequence.request_id].worker)

    def send(self, sequence: Sequence, worker: str, num_blocks: int) -> None:
        """Put a sequence into a worker's line, which is to keep `num_blocks` free for it."""
        place = self._open.pop(sequence.request_id)
        place.worker, place.num_blocks = worker, num_blocks
        line = self._lines.setdefault(worker, OrderedDict())
        goes_first = bool(line) and next(iter(line.values())).number > place.number
        line[sequence.request_id] = place
        if goes_first:
            line.move_to_end(sequence.request_id, last=False)

    def ahead_of(self, sequence: Sequence, worker: str) -> tuple[int, int]:
        """How many stand before a sequence in a worker's line, whether it does or not, and how many blocks are kept free for them."""
        line = self._lines.get(worker)
        if not line:
            return 0, 0
        number = self._places[sequence.request_id].number
        ahead = [place.num_blocks for place in line.values() if place.number < number]
        return len(ahead), sum(ahead)

    def dissolve(self, worker: str) -> None:
        """Nobody stands in this worker's line any more; everybody keeps his place in the order."""
        line = self._lines.pop(worker, None)
        if not line:
            return
        places = list(line.values())
        last = max(place.number for place in places)
        while self._open and next(iter(self._open.values())).number < last:
            places.append(self._open.popitem(last=False)[1])
        for place in sorted(places, key=lambda place: place.number, reverse=True):
            place.worker, place.num_blocks = "", 0
            self._open[place.sequence.request_id] = place
            self._open.move_to_end(place.sequence.request_id, last=False)

    def check_integrity(self) -> None:
        """Assert that lines, order and counts tell one story."""
        numbers = [place.number for place in self._open.values()]
        assert numbers == sorted(numbers), "the queue is out of order"
        assert self._open.keys() == {key for key, place in self._places.items() if not place.worker}
        for worker, line in self._lines.items():
            assert all(self._places[key] is place and place.worker == worker for key, place in line.items())
        assert len(self._open) + sum(map(len, self._lines.values())) == len(self._places)
        assert self.num_tokens == sum(sequence.ledger.num_tokens for sequence in self)

    def _add(self, place: _Place) -> None:
        request_id = place.sequence.request_id
        assert request_id not in self._places
        self._places[request_id] = self._open[request_id] = place
        self.num_tokens += place.sequence.ledger.num_tokens
