"""The queue keeps one order, whoever comes, goes, or stands in a worker's line."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_rig import Rig, submission

from services.scheduler.core.lazy_heap import GARBAGE_MIN, LazyHeap
from services.scheduler.core.ledger import Ledger
from services.scheduler.core.record import Arrival
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.tokens import Tokens
from services.scheduler.core.waiting_queue import WaitingQueue
from tessera.values.config import Config


def waiter(number: int, priority: int = 0, attempt: int = 0, epoch: int = 1) -> Sequence:
    """A sequence that waits; it came as the `number`th of its epoch, and ran before where `attempt` is above 0."""
    request = replace(submission(1000 * epoch + number, [1] * (1 + number % 3)), priority=priority)
    ledger = Ledger(Tokens(request.prompt_token_ids))
    return Sequence(request, Arrival(epoch, number), 1000 * epoch + number, ledger, attempt=attempt)


def drained(queue: WaitingQueue) -> list[tuple[int, int]]:
    """(epoch, number) of all, in the order in which a worker would take them."""
    taken = []
    while (sequence := queue.first_for("w")) is not None:
        taken.append((sequence.arrival.epoch_number, sequence.arrival.counter))
        queue.remove(sequence)
        queue.check_integrity()
    return taken


def test_first_come_first_served_whatever_the_priority() -> None:
    queue = WaitingQueue("fcfs")
    for sequence in (waiter(2, priority=-5), waiter(1, priority=9), waiter(1, epoch=2), waiter(3)):
        queue.push(sequence)
    assert drained(queue) == [(1, 1), (1, 2), (1, 3), (2, 1)]


def test_the_lower_priority_number_goes_first_and_of_equals_the_first_to_come() -> None:
    queue = WaitingQueue("priority")
    for sequence in (
        waiter(1, priority=1),
        waiter(2, priority=-1),
        waiter(3, priority=1),
        waiter(4, priority=0),
        waiter(5, priority=-1),
    ):
        queue.push(sequence)
    assert drained(queue) == [(1, 2), (1, 5), (1, 4), (1, 1), (1, 3)]


@pytest.mark.parametrize("order", ["fcfs", "priority"])
def test_who_ran_before_comes_back_first_among_equals(order: str) -> None:
    """Of two that ran the first to come, though it was sent back first."""
    queue = WaitingQueue(order)
    for sequence in (waiter(1), waiter(2, attempt=3), waiter(4), waiter(3, attempt=1)):
        queue.push(sequence)
    assert drained(queue) == [(1, 2), (1, 3), (1, 1), (1, 4)]


def test_who_ran_before_does_not_come_before_a_higher_priority() -> None:
    queue = WaitingQueue("priority")
    queue.push(waiter(1, priority=5, attempt=1))
    queue.push(waiter(2, priority=4))
    assert drained(queue) == [(1, 2), (1, 1)]


def test_the_oldest_is_known_wherever_it_stands() -> None:
    queue = WaitingQueue("priority")
    oldest, urgent = waiter(1, priority=9), waiter(2)
    assert queue.oldest is None
    queue.push(urgent)
    queue.push(oldest)
    assert queue.oldest is oldest and queue.first_for("w") is urgent
    queue.send(oldest, "w", 1)
    assert queue.oldest is oldest
    queue.remove(oldest)
    assert queue.oldest is urgent


def test_a_higher_priority_waits_for_a_seat_and_is_then_the_next() -> None:
    """Case 32: one seat, a long request of low priority runs. Nobody who runs is sent away for one that waits, of whatever priority."""
    rig = Rig(Config(max_num_seqs=1, max_num_batched_tokens=16, queue_order="priority"))
    rig.submit(1, [10, 11, 12], max_tokens=8, priority=9)
    rig.step()
    rig.submit(2, [20, 21], max_tokens=2, priority=5)
    rig.submit(3, [30, 31], max_tokens=2, priority=0)
    rig.submit(4, [40, 41], max_tokens=2, priority=0)
    rig.finish_all()
    entered = [entry.request_id[-1] for batch in rig.batches for entry in batch.entries]
    assert entered == [1, 3, 4, 2] and rig.scheduler.load().num_preemptions == 0


def test_what_is_taken_out_of_the_middle_leaves_no_garbage_for_ever() -> None:
    heap: LazyHeap[int] = LazyHeap()
    heap.add(b"first", (0,), 0)
    for number in range(1, 10_000):
        heap.add(number.to_bytes(4, "big"), (number,), number)
        heap.take(number.to_bytes(4, "big"))
        assert len(heap._heap) <= 2 * len(heap) + GARBAGE_MIN
    assert heap.first() == 0
    heap.check_integrity()


class QueueMachine(RuleBasedStateMachine):
    """Beside the queue a plain list of everybody, sorted anew each time, and who stands in which line."""

    @initialize(order=st.sampled_from(("fcfs", "priority")))
    def start(self, order: str) -> None:
        self.queue, self.order, self.count = WaitingQueue(order), order, 0
        self.waiting: list[Sequence] = []
        self.lines: dict[bytes, tuple[str, int]] = {}

    @rule(priority=st.integers(-2, 2), attempt=st.integers(0, 1))
    def push(self, priority: int, attempt: int) -> None:
        self.count += 1
        self.waiting.append(waiter(self.count, priority, attempt))
        self.queue.push(self.waiting[-1])

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(sequence)
        self.queue.remove(sequence)
        self.lines.pop(sequence.request_id, None)

    @rule(worker=st.sampled_from(("a", "b")), to=st.sampled_from(("a", "b")), num_blocks=st.integers(0, 3))
    def send(self, worker: str, to: str, num_blocks: int) -> None:
        sequence = self.queue.first_for(worker)
        if sequence is not None and not self.queue.stands_in_line(sequence):
            self.queue.send(sequence, to, num_blocks)
            self.lines[sequence.request_id] = to, num_blocks

    @rule(worker=st.sampled_from(("a", "b")))
    def dissolve(self, worker: str) -> None:
        self.queue.dissolve(worker)
        self.lines = {key: line for key, line in self.lines.items() if line[0] != worker}

    def rank(self, sequence: Sequence) -> tuple[int, bool, Arrival]:
        priority = sequence.submission.priority if self.order == "priority" else 0
        return priority, sequence.attempt == 0, sequence.arrival

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "queue"):
            return
        self.queue.check_integrity()
        assert set(self.queue) == set(self.waiting)
        assert self.queue.oldest is min(self.waiting, key=lambda sequence: sequence.arrived_us, default=None)
        for worker in ("a", "b"):
            mine = [s for s in self.waiting if self.lines.get(s.request_id, (worker, 0))[0] == worker]
            assert self.queue.first_for(worker) is min(mine, key=self.rank, default=None)
            for sequence in self.waiting:
                ahead = [
                    self.lines[other.request_id][1]
                    for other in self.waiting
                    if self.lines.get(other.request_id, ("", 0))[0] == worker and self.rank(other) < self.rank(sequence)
                ]
                assert self.queue.ahead_of(sequence, worker) == (len(ahead), sum(ahead))


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True)
