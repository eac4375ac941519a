"""The moves a sequence can make, each with everything that has to change with it: queue, slot, blocks, journal."""

from kv_manager.allocation import PrefixMatch
from kv_manager.host_pool import HostPoolExhausted
from services.scheduler.core.fleet import Fleet
from services.scheduler.core.replica import Replica
from services.scheduler.core.request_book import RequestBook
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.sequence_status import SequenceStatus
from services.scheduler.core.service_figures import ServiceFigures
from services.scheduler.core.suspects import Suspects
from services.scheduler.core.time_limits import TimeLimitQueue
from services.scheduler.core.waiting_queue import WaitingQueue
from tessera.values.finish import Finish


class Lifecycle:
    """All requests, the queue, the workers and the suspects, kept in step."""

    __slots__ = ("_num_admissions", "book", "figures", "fleet", "limits", "suspects", "waiting")

    def __init__(self, queue_order: str = "fcfs") -> None:
        self.book = RequestBook()
        self.waiting = WaitingQueue(queue_order)
        self.fleet = Fleet()
        self.suspects = Suspects()
        self.limits = TimeLimitQueue()
        self.figures = ServiceFigures()
        self._num_admissions = 0

    def next_admission(self) -> int:
        """A number above those of all admissions so far."""
        self._num_admissions += 1
        return self._num_admissions

    def forget_counts(self) -> None:
        """What has ended so far did so under an earlier leader."""
        self.book.forget_counts()
        self.figures = ServiceFigures()

    def begin(self, sequence: Sequence) -> None:
        """A new or recovered sequence waits."""
        self.enter(sequence)
        self.waiting.push(sequence)

    def enter(self, sequence: Sequence) -> None:
        """A new or recovered sequence comes in, its limits running; the caller has it wait, or go on in its slot."""
        self.book.add(sequence)
        self.limits.add(sequence)

    def end_late(self, now_us: int) -> None:
        """End every sequence of which a time limit is over."""
        while (due := self.limits.take_over(now_us)) is not None:
            self.end(due.sequence, due.finish(), now_us)

    def send_back(self, sequence: Sequence) -> None:
        """A running or swapped sequence loses slot and blocks and waits, tokens kept."""
        self._vacate(sequence, None)
        self.requeue(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """A sequence whose slot and blocks are gone waits, tokens kept."""
        sequence.wait()
        self.waiting.push(sequence)
        self.book.touch(sequence)

    def swap_out(self, sequence: Sequence) -> HostPoolExhausted | None:
        """A running sequence gives up its blocks for host blocks and keeps its slot; nothing changes where these are too few."""
        exhausted = self._replica_of(sequence).swap_out(sequence)
        if exhausted is None:
            self.book.touch(sequence)
        return exhausted

    def swap_in(self, sequence: Sequence, match: PrefixMatch, num_tokens: int) -> None:
        """A swapped sequence runs again, with blocks for `num_tokens` tokens, which the caller has counted as free."""
        exhausted = self._replica_of(sequence).swap_in(sequence, match, num_tokens)
        assert exhausted is None, f"counted as fitting: {exhausted}"
        self.book.touch(sequence)

    def restart_from(self, sequence: Sequence, output_token_ids: tuple[int, ...]) -> None:
        """A live sequence waits with another output."""
        held_len = sequence.held_len
        if sequence.slot is not None:
            self.send_back(sequence)
        self.waiting.remove(sequence)
        sequence.restart_from(output_token_ids, held_len)
        self.waiting.push(sequence)
        self.book.touch(sequence)

    def end(self, sequence: Sequence, finish: Finish, now_us: int) -> None:
        """A live sequence takes its terminal mark and gives up what it has."""
        if sequence.slot is not None:
            self._vacate(sequence, finish)
        else:
            self.waiting.remove(sequence)
        sequence.end(finish, now_us)
        self.book.ended(sequence)
        self.limits.discard(sequence)
        self.figures.end(sequence)
        self.suspects.clear((sequence,))

    def lose(self, replica: Replica) -> None:
        """A worker is gone: its sequences wait, and those in its line are anybody's."""
        for sequence in replica.lose():
            self.requeue(sequence)
        self.waiting.dissolve(replica.name)

    def end_if_stopped(self, sequence: Sequence, checked: int, now_us: int) -> None:
        """End a live sequence at the earliest stop after its first `checked` output tokens, if there is one."""
        finish = sequence.first_stop(checked)
        if finish is not None:
            self.end(sequence, finish, now_us)

    def apply_rules(self, now_us: int) -> None:
        """The workers, or tokens taken from them, have changed: every live sequence gets its rules anew, and ends if they say so. What it was
        promised stays, and grows with the largest pool. One that is swapped out where the pool does not hold it to its end any more might
        never come back: it waits for another worker."""
        for sequence in [sequence for sequence in self.book if sequence.finish is None]:
            promised = sequence.tokens_max
            sequence.set_rules(self.fleet.rules(sequence.submission, promised))
            if sequence.tokens_max != promised:
                self.book.touch(sequence)
            self.end_if_stopped(sequence, 0, now_us)
            if sequence.status is SequenceStatus.SWAPPED and not self._replica_of(sequence).can_hold(sequence):
                self.send_back(sequence)

    def check_integrity(self) -> None:
        """Assert that queue, workers and requests tell one story."""
        self.book.check_integrity()
        self.waiting.check_integrity()
        self.suspects.check_integrity()
        self.limits.check_integrity()
        for replica in self.fleet:
            replica.check_integrity()
        for sequence in self.book:
            own = self.fleet.get(sequence.worker)
            runs = own is not None and own.running.get(sequence.request_id) is sequence
            is_swapped = own is not None and own.swapped.get(sequence.request_id) is sequence
            assert runs == (sequence.status is SequenceStatus.RUNNING)
            assert is_swapped == (sequence.status is SequenceStatus.SWAPPED)
            assert (sequence in self.waiting) == (sequence.status is SequenceStatus.WAITING)
            if sequence.finish is not None:
                assert sequence.output_len == sequence.finish.output_len
            elif sequence.rules is not None:
                assert sequence.ledger.num_tokens < sequence.tokens_max, "a request went on beyond its end"
        num_held = sum(len(replica.running) + len(replica.swapped) for replica in self.fleet)
        assert num_held + len(self.waiting) + self.book.num_finished == len(self.book)

    def _vacate(self, sequence: Sequence, finish: Finish | None) -> None:
        self._replica_of(sequence).vacate(sequence, finish)

    def _replica_of(self, sequence: Sequence) -> Replica:
        replica = self.fleet.get(sequence.worker)
        assert replica is not None
        return replica
