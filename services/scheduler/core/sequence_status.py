"""States and step types of a sequence, with the one table of allowed transitions."""

from enum import Enum


class SequenceStatus(Enum):
    """Where a sequence is in its life (ATOM's `SequenceStatus`)."""

    WAITING = "waiting"  # queued, holds no blocks
    RUNNING = "running"  # holds a slot and blocks on a worker
    FINISHED = "finished"  # has its terminal mark; readable until its retention ends


class SequenceType(Enum):
    """What a sequence computed last (ATOM's `SequenceType`)."""

    DUMMY = "dummy"  # nothing yet
    PREFILL = "prefill"
    DECODE = "decode"


ALLOWED_TRANSITIONS: dict[SequenceStatus, frozenset[SequenceStatus]] = {
    SequenceStatus.WAITING: frozenset({SequenceStatus.RUNNING, SequenceStatus.FINISHED}),
    SequenceStatus.RUNNING: frozenset({SequenceStatus.WAITING, SequenceStatus.FINISHED}),
    SequenceStatus.FINISHED: frozenset(),
}
"""An abort finishes with the reason ABORTED; RUNNING to WAITING is a preemption or a lost worker."""
