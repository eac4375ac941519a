"""How a worker comes to forget the slots that were dropped: it tells of each in every report until it is told that the journal has what came
of the drop. Whoever wants its blocks' content forgotten for good waits for that."""

from collections import deque


class SlotSweep:
    """Of one replica: up to which step it is wanted, told and done. Usually a batch that leaves anyway tells; where there is none, two empty
    ones do: the first drops what is still to be dropped, the second leaves when that is durable."""

    __slots__ = ("_in_flight", "_told_step", "done_step", "wanted_step")

    def __init__(self) -> None:
        self.wanted_step = 0
        self.done_step = 0  # the worker has forgotten what was dropped in steps up to this one
        self._told_step = 0
        self._in_flight: deque[int] = deque()  # the durable step of each batch

    @property
    def is_pending(self) -> bool:
        """Whether the worker may still tell of a slot that it is to forget."""
        return self.wanted_step > self.done_step

    def owes_batch(self, next_step: int, durable_step: int) -> bool:
        """Whether a batch is to leave for this alone."""
        wanted = self.wanted_step
        return wanted > self._told_step and (next_step <= wanted or durable_step >= wanted)

    def issued(self, durable_step: int) -> None:
        """A batch has left that says so."""
        self._told_step = durable_step
        self._in_flight.append(durable_step)

    def answered(self) -> None:
        """The oldest batch was executed."""
        self.done_step = self._in_flight.popleft()

    def void(self) -> None:
        """The batches in flight may never be executed."""
        self._in_flight.clear()
