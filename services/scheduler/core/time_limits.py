"""Who has to be done by when: requests whose time is over end, and what they held is free."""

from dataclasses import dataclass

from services.scheduler.core.lazy_heap import LazyHeap
from services.scheduler.core.sequence import Sequence
from tessera.values.finish import Finish, FinishReason
from tessera.values.request import TimeLimits

_WAITED_FOR = {
    "max_queue_ms": "the request was not scheduled",
    "max_first_token_ms": "the request had no output",
    "max_total_ms": "the request had not ended",
    "deadline_ms": "the request had not ended",
}
"""Name of each limit -> what had not come when it was over."""

assert _WAITED_FOR.keys() == TimeLimits.__dataclass_fields__.keys()


@dataclass(frozen=True, slots=True, eq=False)
class Due:
    """One limit of one request, on the scheduler's clock."""

    sequence: Sequence
    limit: str
    due_us: int

    @property
    def holds(self) -> bool:
        """Whether what the limit is for has still not come."""
        if self.limit == "max_queue_ms":
            return self.sequence.attempt == 0 and not self.sequence.output_len
        return self.limit != "max_first_token_ms" or not self.sequence.output_len

    def finish(self) -> Finish:
        """The end that it brings."""
        ms = getattr(self.sequence.submission.limits, self.limit)
        message = f"{_WAITED_FOR[self.limit]} within {ms} ms"
        return Finish(FinishReason.DEADLINE, self.sequence.output_len, message=message, limit=self.limit)


class TimeLimitQueue:
    """The limits of the live requests, the next one first. One without limits costs a look at its submission."""

    __slots__ = ("_due",)

    def __init__(self) -> None:
        self._due: LazyHeap[Due] = LazyHeap()

    def add(self, sequence: Sequence) -> None:
        """A request has come, or was recovered: its clock goes on from `arrived_us`."""
        for name, limit, ms in _given(sequence):
            due_us = sequence.arrived_us + 1000 * ms
            self._due.add(name, (due_us,), Due(sequence, limit, due_us))

    def discard(self, sequence: Sequence) -> None:
        """A request has ended."""
        for name, _, _ in _given(sequence):
            if name in self._due:
                self._due.take(name)

    def take_over(self, now_us: int) -> Due | None:
        """The next limit that is over and holds, taken out; None where there is none yet."""
        while (due := self._due.first()) is not None and due.due_us <= now_us:
            self._due.take(_name(due.sequence, due.limit))
            if due.holds:
                return due
        return None

    def check_integrity(self) -> None:
        """Assert that nobody is here who has ended."""
        self._due.check_integrity()
        assert all(due.sequence.finish is None for due in self._due), "an ended request has a limit"


def _given(sequence: Sequence) -> list[tuple[bytes, str, int]]:
    """(name in the heap, limit, milliseconds) of each limit that a request has."""
    limits = sequence.submission.limits
    if limits is None:
        return []
    named = ((limit, getattr(limits, limit)) for limit in _WAITED_FOR)
    return [(_name(sequence, limit), limit, ms) for limit, ms in named if ms]


def _name(sequence: Sequence, limit: str) -> bytes:
    return sequence.request_id + limit.encode()
