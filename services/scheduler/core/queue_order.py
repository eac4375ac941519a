"""Who comes before whom: of the sequences that wait, and of those that run where blocks are short."""

from collections.abc import Callable
from typing import TypeAlias

from services.scheduler.core.sequence import Sequence

Rank: TypeAlias = tuple[int, ...]
"""Lower comes first. No two live sequences have the same: each ends with the arrival, (epoch number, counter)."""

RankOf: TypeAlias = Callable[[Sequence], Rank]

PREEMPTIONS_MAX = 4
"""After so many preemptions a sequence gives way only to others preempted as often that arrived before it, whatever its priority.

These are finitely many and each ends, so preemptions per request are bounded although requests of a higher priority may keep coming.
"""


def _priority(sequence: Sequence) -> int:
    return sequence.submission.priority


def _equal(_: Sequence) -> int:
    return 0


PRIORITY_BY_ORDER: dict[str, Callable[[Sequence], int]] = {"fcfs": _equal, "priority": _priority}
"""What comes before the arrival, by the names of `Config.queue_order`; lower first."""


def waiting_rank(order: str) -> RankOf:
    """Of those that wait: by priority where the order says so; of equals those that ran before (preempted, or their worker was lost), then
    by arrival.

    Nobody starves for it: those before a sequence of the same priority that waits for its first turn ran before it came to the head, and no
    other of its priority that has not run yet gets past it; so they are finitely many, and each of them ends.
    """
    priority = PRIORITY_BY_ORDER[order]

    def rank(sequence: Sequence) -> Rank:
        arrival = sequence.arrival
        return priority(sequence), int(sequence.attempt == 0), arrival.epoch_number, arrival.counter

    return rank


def running_rank(order: str) -> RankOf:
    """Of those that run: one takes blocks only from those behind it (see `PREEMPTIONS_MAX`), then by priority where the order says so, then
    by arrival. A running sequence keeps its rank."""
    priority = PRIORITY_BY_ORDER[order]

    def rank(sequence: Sequence) -> Rank:
        arrival, is_spared = sequence.arrival, sequence.timings.num_preemptions >= PREEMPTIONS_MAX
        return int(not is_spared), 0 if is_spared else priority(sequence), arrival.epoch_number, arrival.counter

    return rank
