"""Who makes room, by each policy; and that whatever it chooses, everybody ends after few preemptions."""

import pytest
from fake_worker import FakeWorker
from scheduler_rig import WORKER, Rig

from services.scheduler.core import queue_order
from services.scheduler.core.preemption import Preemption
from services.scheduler.core.queue_order import running_rank
from services.scheduler.core.replica import Replica
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.sequence_status import SequenceStatus
from services.scheduler.core.step_plan import StepPlan
from services.scheduler.core.victims import VICTIM_CHOICES, Candidate
from tessera.values.config import PREEMPTION_MODES, PREEMPTION_POLICIES, QUEUE_ORDERS, Config


def numbers(count: int, first: int = 10) -> list[int]:
    return list(range(first, first + count))


def rig_of(num_blocks: int, budget: int = 64, num_host_blocks: int = 0, **config: object) -> Rig:
    fields = {"max_num_seqs": 8, "max_num_batched_tokens": budget, **config}
    return Rig(Config(**fields), FakeWorker(num_blocks, 4, num_host_blocks=num_host_blocks))


def preemption_of(rig: Rig) -> Preemption:
    return rig.scheduler._batcher.preemption


def replica_of(rig: Rig) -> Replica:
    replica = rig.scheduler.replica(WORKER)
    assert replica is not None
    return replica


CANDIDATES = [
    Candidate(priority=0, admission=1, num_remaining=30, num_cached_tokens=0),
    Candidate(priority=7, admission=2, num_remaining=5, num_cached_tokens=0),
    Candidate(priority=0, admission=3, num_remaining=6, num_cached_tokens=8),
    Candidate(priority=0, admission=4, num_remaining=4, num_cached_tokens=4),
]


@pytest.mark.parametrize(("policy", "chosen"), [("fcfs", 3), ("priority", 1), ("shortest_remaining", 0), ("recompute", 2)])
def test_each_policy_by_its_rule(policy: str, chosen: int) -> None:
    assert VICTIM_CHOICES[policy](CANDIDATES) == chosen
    assert VICTIM_CHOICES[policy]([CANDIDATES[0]]) == 0


@pytest.mark.parametrize("policy", PREEMPTION_POLICIES)
def test_of_equals_the_latest_admitted_whatever_their_order(policy: str) -> None:
    alike = [Candidate(1, admission, 9, 4) for admission in (5, 2, 8, 3)]
    assert VICTIM_CHOICES[policy](alike) == 2


def test_every_policy_of_the_config_is_there() -> None:
    assert tuple(VICTIM_CHOICES) == PREEMPTION_POLICIES


@pytest.mark.parametrize(("policy", "number"), [("fcfs", 5), ("priority", 3), ("shortest_remaining", 2), ("recompute", 4)])
def test_a_running_request_that_grows_sends_away_whom_the_policy_names(policy: str, number: int) -> None:
    rig = rig_of(16, preemption_policy=policy)
    rig.submit(1, numbers(8), max_tokens=6)
    rig.submit(2, numbers(3, 20), max_tokens=20)
    rig.submit(3, numbers(3, 30), max_tokens=5, priority=7)
    rig.submit(4, numbers(9, 40), max_tokens=6)
    rig.submit(5, numbers(3, 50), max_tokens=4)
    rig.step()
    victim = preemption_of(rig).make_room(replica_of(rig), StepPlan(64, 8), rig.sequence(1))
    assert victim is rig.sequence(number) and victim.status is SequenceStatus.WAITING
    assert victim.timings.num_preemptions == 1
    rig.finish_all()
    for each in range(1, 6):
        rig.assert_as_alone(each)


@pytest.mark.parametrize("policy", PREEMPTION_POLICIES)
def test_nobody_takes_blocks_from_one_before_him_or_in_this_steps_batch(policy: str) -> None:
    """Where there is nobody else he goes himself."""
    rig = rig_of(16, preemption_policy=policy, queue_order="priority")
    rig.submit(1, numbers(3, 20), max_tokens=20, priority=1)
    rig.submit(2, numbers(3, 30), max_tokens=20, priority=2)
    rig.submit(3, numbers(3, 40), max_tokens=20, priority=0)
    rig.step()
    preemption, replica = preemption_of(rig), replica_of(rig)
    assert list(replica.running) == [rig.sequence(number).request_id for number in (3, 1, 2)]
    plan = StepPlan(64, 8)
    plan.sequences.append(rig.sequence(2))
    assert preemption.make_room(replica, plan, rig.sequence(1)) is rig.sequence(1)
    plan.sequences.clear()
    assert preemption.make_room(replica, plan, rig.sequence(3)) is rig.sequence(2)


def test_a_request_is_not_sent_away_twice_or_while_it_waits() -> None:
    """Case 35: nothing changes, here or at the worker, where a drop that comes again finds nobody."""
    rig = rig_of(16)
    rig.submit(1, numbers(7), max_tokens=5)
    rig.submit(2, numbers(7, 30), max_tokens=5)
    rig.step()
    lifecycle, free_before = rig.scheduler._lifecycle, rig.free_blocks
    lifecycle.send_back(rig.sequence(2))
    free_after = rig.free_blocks
    assert free_after == free_before + 2
    for _ in range(2):
        with pytest.raises(AssertionError):
            lifecycle.send_back(rig.sequence(2))
        rig.check()
        assert rig.free_blocks == free_after and rig.sequence(2).status is SequenceStatus.WAITING
    replica_of(rig).drops *= 2
    rig.finish_all()
    assert next(len(batch.drops) for batch in rig.batches if batch.drops) == 2
    rig.assert_as_alone(1)
    rig.assert_as_alone(2)
    assert rig.free_blocks == 16 and not rig.worker.slots


@pytest.mark.parametrize("mode", PREEMPTION_MODES)
@pytest.mark.parametrize("policy", PREEMPTION_POLICIES)
def test_urgent_requests_send_nobody_away_more_often_than_a_few_times(
    policy: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever the patient one runs alone, an urgent one comes and outgrows the pool. After so many times it is the urgent one that goes."""

    def times_sent_away(preemptions_max: int) -> int:
        monkeypatch.setattr(queue_order, "PREEMPTIONS_MAX", preemptions_max)
        rig = rig_of(6, num_host_blocks=8, preemption_policy=policy, preemption_mode=mode, queue_order="priority")
        rig.submit(1, numbers(4), max_tokens=17, priority=9)
        number, patient = 1, rig.sequence(1)
        while patient.finish is None:
            load = rig.scheduler.load()
            if patient.status is SequenceStatus.RUNNING and load.num_running == 1 and not load.num_waiting + load.num_swapped:
                number += 1
                rig.submit(number, numbers(4, 20 + number % 30), max_tokens=13, priority=0)
            assert rig.step()
        rig.finish_all()
        for each in range(1, number + 1):
            rig.assert_as_alone(each)
        return patient.timings.num_preemptions

    assert times_sent_away(1000) > 1
    assert times_sent_away(1) == 1


class Watch:
    """Who made room for whom, and that the first in rank never did, unless for lack of a place in the batch."""

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lost: dict[bytes, int] = {}
        rank, real = running_rank(rig.config.queue_order), Preemption.make_room

        def make_room(preemption: Preemption, replica: Replica, plan: StepPlan, sequence: Sequence) -> Sequence:
            first = min(replica.running.values(), key=rank)
            is_alone = len(replica.running) == 1
            victim = real(preemption, replica, plan, sequence)
            assert is_alone or victim is not first, "the first of all lost its blocks"
            self.lost[victim.request_id] = self.lost.get(victim.request_id, 0) + 1
            return victim

        monkeypatch.setattr(Preemption, "make_room", make_room)


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("order", QUEUE_ORDERS)
@pytest.mark.parametrize("mode", PREEMPTION_MODES)
@pytest.mark.parametrize("policy", PREEMPTION_POLICIES)
def test_no_livelock_and_no_thrash(policy: str, mode: str, order: str, in_flight: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight requests in a pool for two: steps are bounded by the work, preemptions by the blocks that all of them come to hold."""
    rig = rig_of(7, budget=16, num_host_blocks=9, preemption_policy=policy, preemption_mode=mode, queue_order=order)
    watch = Watch(rig, monkeypatch)
    for number in range(1, 9):
        rig.submit(number, numbers(3 + number % 4, 10 + number), max_tokens=12, priority=number % 3)
    steps = rig.finish_all(in_flight, steps_max=150)
    assert steps <= 8 * 13, "no faster than one after the other"
    for number in range(1, 9):
        rig.assert_as_alone(number)
        assert rig.sequence(number).timings.num_preemptions == watch.lost.get(rig.sequence(number).request_id, 0)
    num_blocks = sum(-(-(3 + number % 4 + 11) // 4) for number in range(1, 9))
    assert sum(watch.lost.values()) <= num_blocks
    assert max(watch.lost.values()) <= 4, "one of them gave way again and again"
    assert rig.free_blocks == 7
