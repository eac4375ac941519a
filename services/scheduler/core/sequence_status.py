"""States and step types of a sequence, with the one table of allowed transitions."""

from enum import Enum


class SequenceStatus(Enum):
    """Where a sequence is in its life (ATOM's `SequenceStatus`)."""

    WAITING = "waiting"  # queued, holds no blocks
    RUNNING = "running"  # holds a slot, and blocks of a worker's pool
    SWAPPED = "swapped"  # keeps its slot, its KV is in the worker's host memory; it takes part in no row
    FINISHED = "finished"  # has its terminal mark; readable until its retention ends
    ABORTED = "aborted"  # as FINISHED, by the reason ABORTED

    @property
    def has_ended(self) -> bool:
        """Whether nothing follows."""
        return not ALLOWED_TRANSITIONS[self]


class SequenceType(Enum):
    """What a sequence computed last (ATOM's `SequenceType`)."""

    DUMMY = "dummy"  # nothing yet
    PREFILL = "prefill"
    DECODE = "decode"


ALLOWED_TRANSITIONS: dict[SequenceStatus, dict[SequenceStatus, str]] = {
    SequenceStatus.WAITING: {
        SequenceStatus.RUNNING: "admitted, with a slot and blocks",
        SequenceStatus.SWAPPED: "found swapped out in a worker's report",
        SequenceStatus.FINISHED: "a stop in tokens received, or no pool holds it any more",
        SequenceStatus.ABORTED: "abort",
    },
    SequenceStatus.RUNNING: {
        SequenceStatus.WAITING: "preempted by recompute, or its worker is lost",
        SequenceStatus.SWAPPED: "preempted by swap",
        SequenceStatus.FINISHED: "a stop, a cap or an error",
        SequenceStatus.ABORTED: "abort",
    },
    SequenceStatus.SWAPPED: {
        SequenceStatus.RUNNING: "swapped in",
        SequenceStatus.WAITING: "its worker is lost, leaves or is too small for it, or restarted from other tokens",
        SequenceStatus.FINISHED: "a stop in an output that was in flight",
        SequenceStatus.ABORTED: "abort",
    },
    SequenceStatus.FINISHED: {},
    SequenceStatus.ABORTED: {},
}
"""From each status those that may follow, and what leads there. docs/states.md shows it."""
