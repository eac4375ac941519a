"""Which worker takes a request: the pure choices, and that a better worker with room gets it while nobody starves or idles."""

import pytest
from fleet_rig import FleetRig

from services.scheduler.core.replica import PATIENCE_US
from services.scheduler.core.sequence_status import SequenceStatus
from services.scheduler.core.worker_choice import (
    CHOICES,
    TOKENS_PER_REQUEST,
    WorkerLoad,
    least_requests,
    least_tokens,
    prefix_aware,
    round_robin,
)
from tessera.values.config import WORKER_CHOICES

LONG = list(range(10, 43))  # 8 blocks of 4 and one more


def test_every_choice_can_be_configured() -> None:
    assert tuple(CHOICES) == WORKER_CHOICES


def test_round_robin_takes_turns() -> None:
    loads = [WorkerLoad(9, 9, 0), WorkerLoad(0, 0, 0), WorkerLoad(5, 5, 5)]
    assert [round_robin(loads, turn) for turn in range(5)] == [0, 1, 2, 0, 1]


@pytest.mark.parametrize(
    ("loads", "by_requests", "by_tokens"),
    [
        ([(2, 10), (1, 90)], 1, 0),
        ([(1, 90), (1, 10)], 1, 1),
        ([(1, 50), (2, 50)], 0, 0),
        ([(1, 50), (1, 50)], 0, 0),
    ],
)
def test_least_load(loads: list[tuple[int, int]], by_requests: int, by_tokens: int) -> None:
    workers = [WorkerLoad(requests, tokens, 0) for requests, tokens in loads]
    assert (least_requests(workers, 7), least_tokens(workers, 7)) == (by_requests, by_tokens)


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ([(0, 0, 0), (0, 0, 16)], 1),  # the cached prefix first
        ([(0, 0, 0), (1, 20, 1000)], 1),
        ([(0, 0, 0), (3, 20, 1000)], 1),
        ([(3, 20, 100), (4, 20, 100)], 0),  # then the load
        ([(2, 20, 100), (2, 10, 100)], 1),
        ([(0, 0, 0), (2, 20, TOKENS_PER_REQUEST)], 0),  # a short prefix is not worth many neighbours
        ([(0, 0, 0), (16, 0, 1000)], 0),
    ],
)
def test_prefix_aware(loads: list[tuple[int, int, int]], expected: int) -> None:
    assert prefix_aware([WorkerLoad(*load) for load in loads], 0) == expected


def test_a_request_goes_where_its_prefix_is_cached_whoever_asks_first() -> None:
    rig = FleetRig()
    rig.submit(1, LONG, max_tokens=1)
    rig.finish_all()
    owner = next(name for name, worker in rig.workers.items() if worker.computed_positions)
    other = next(name for name in rig.workers if name != owner)
    rig.submit(2, LONG, max_tokens=3)
    assert rig.schedule(other) is None, "it is not for this one"
    batch = rig.schedule(owner)
    assert batch is not None and batch.entries[0].num_cached_tokens == 32
    rig.finish_all()
    rig.assert_as_alone(2)


@pytest.mark.parametrize("choice", WORKER_CHOICES)
def test_load_is_spread(choice: str) -> None:
    rig = FleetRig(3, worker_choice=choice)
    for number in range(1, 10):
        rig.submit(number, [number, 20 + number, 30], max_tokens=4)
    rig.turn()
    assert sorted(len(rig.scheduler.replica(name).running) for name in rig.workers) == [3, 3, 3]
    rig.finish_all()
    for number in range(1, 10):
        rig.assert_as_alone(number)


def test_who_waits_in_the_line_of_a_busy_worker_does_not_hold_up_the_others() -> None:
    """The better worker has room but is in the middle of its steps: the other one serves who comes behind."""
    rig = FleetRig()
    rig.submit(1, LONG, max_tokens=12)
    rig.submit(4, [4, 4, 4], max_tokens=12)
    rig.turn()
    owner, other = rig.sequence(1).worker, rig.sequence(4).worker
    assert owner != other
    while rig.schedule(owner) is not None:
        pass
    rig.submit(2, LONG, max_tokens=2)
    rig.submit(3, [7, 8, 9], max_tokens=2)
    batch = rig.schedule(other)
    assert batch is not None and [entry.request_id[-1] for entry in batch.entries] == [3]
    rig.execute(owner)
    batch = rig.schedule(owner)
    assert batch is not None and [entry.request_id[-1] for entry in batch.entries] == [2]
    rig.finish_all()
    for number in (1, 2, 3, 4):
        rig.assert_as_alone(number)


def test_a_worker_that_is_slow_is_not_waited_for() -> None:
    """A long step, or a hang that nobody has noticed yet: who stood in its line goes to the other one."""
    rig = FleetRig()
    rig.submit(1, LONG, max_tokens=12)
    rig.submit(4, [4, 4, 4], max_tokens=12)
    rig.turn()
    owner, other = rig.sequence(1).worker, rig.sequence(4).worker
    while rig.schedule(owner) is not None:
        pass
    rig.submit(2, LONG, max_tokens=2)
    rig.schedule(other)
    assert rig.scheduler._lifecycle.waiting.stands_in_line(rig.sequence(2))
    rig.now_us += PATIENCE_US + 1
    rig.execute(other)
    rig.submit(3, [7, 8, 9], max_tokens=2)
    batch = rig.schedule(other)
    assert batch is not None and [entry.request_id[-1] for entry in batch.entries] == [2, 3]
    rig.finish_all()
    for number in (1, 2, 3, 4):
        rig.assert_as_alone(number)


def test_a_worker_without_room_is_not_waited_for() -> None:
    rig = FleetRig(max_num_seqs=1)
    rig.submit(1, LONG, max_tokens=12)
    rig.turn()
    rig.submit(2, LONG, max_tokens=2)
    rig.turn()
    assert rig.sequence(2).worker not in ("", rig.sequence(1).worker), "the cached prefix is where no seat is"
    rig.finish_all()
    rig.assert_as_alone(2)


def test_a_head_that_fits_nowhere_holds_up_those_behind_it() -> None:
    """First come, first served, over all workers: otherwise small requests starve a large one."""
    rig = FleetRig(num_blocks=10)
    for number in (1, 2):
        rig.submit(number, [number] * 20, max_tokens=8)
    rig.turn()
    rig.submit(3, [3] * 30, max_tokens=2)
    rig.submit(4, [4, 5], max_tokens=1)
    rig.turn()
    assert rig.sequence(3).status is rig.sequence(4).status is SequenceStatus.WAITING
    rig.finish_all()
    for number in (1, 2, 3, 4):
        rig.assert_as_alone(number)


def test_a_line_whose_blocks_are_gone_chooses_anew() -> None:
    """What a worker kept free went to a sequence that grew: who stood in its line goes to the other one."""
    rig = FleetRig(num_blocks=14, worker_choice="round_robin")
    rig.submit(1, [1] * 30, max_tokens=20)
    rig.submit(2, [2] * 30, max_tokens=2)
    rig.turn()
    first, second = rig.sequence(1).worker, rig.sequence(2).worker
    rig.submit(3, [3] * 17, max_tokens=3)
    assert {first, second} == set(rig.workers)
    rig.schedule(second)  # fits only the first, and goes into its line
    for _ in range(8):
        rig.schedule(first) if not rig.workers[first].queue else rig.execute(first)
    rig.finish_all()
    for number in (1, 2, 3):
        rig.assert_as_alone(number)


def test_a_request_that_only_a_larger_pool_holds_waits_for_it_alone() -> None:
    rig = FleetRig(1, num_blocks=6)
    rig.join("large", 40)
    rig.submit(1, [1] * 40, max_tokens=20)
    rig.lose("large")
    rig.submit(2, [2] * 30, max_tokens=10)
    rig.submit(3, [3] * 3, max_tokens=2)
    assert rig.scheduler.request_len_max == 64
    for _ in range(5):
        rig.turn()
    rig.assert_as_alone(3)
    assert rig.sequence(1).status is rig.sequence(2).status is SequenceStatus.WAITING
    rig.attach("large")
    rig.finish_all()
    for number in (1, 2):
        rig.assert_as_alone(number)


def test_a_small_pool_that_joins_ends_nobody() -> None:
    rig = FleetRig(1, num_blocks=20)
    rig.submit(1, [1] * 30, max_tokens=20)
    rig.turn()
    rig.join("small", 4)
    assert rig.sequence(1).finish is None
    rig.finish_all()
    rig.assert_as_alone(1)
    assert not rig.workers["small"].computed_positions
