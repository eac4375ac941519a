"""The queue of waiting sequences: first come, first served; a preempted one goes back to the head."""

from collections import OrderedDict
from collections.abc import Iterator

from services.scheduler.core.sequence import Sequence


class WaitingQueue:
    """Sequences without blocks, next to be admitted first. Nobody is skipped: a head that does not fit yet holds up those behind it,
    so that it gets the blocks which running sequences give up. Tokens of a queued sequence must not change."""

    __slots__ = ("_sequences", "num_tokens")

    def __init__(self) -> None:
        self._sequences: OrderedDict[bytes, Sequence] = OrderedDict()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def __contains__(self, sequence: Sequence) -> bool:
        return self._sequences.get(sequence.request_id) is sequence

    @property
    def head(self) -> Sequence:
        """The sequence to be admitted next; the queue must not be empty."""
        return next(iter(self._sequences.values()))

    def push(self, sequence: Sequence) -> None:
        """Queue a new sequence at the tail."""
        assert sequence.request_id not in self._sequences
        self._sequences[sequence.request_id] = sequence
        self.num_tokens += sequence.ledger.num_tokens

    def push_front(self, sequence: Sequence) -> None:
        """Queue a sequence that ran already at the head."""
        self.push(sequence)
        self._sequences.move_to_end(sequence.request_id, last=False)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands."""
        del self._sequences[sequence.request_id]
        self.num_tokens -= sequence.ledger.num_tokens
