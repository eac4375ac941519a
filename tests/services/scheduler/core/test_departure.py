"""A worker that says that it is to end: its requests go to the others a few at a time, and nobody pauses for long."""

from dataclasses import replace

from fleet_rig import LIMITS, FleetRig
from scheduler_rig import own_stop

from services.scheduler.core.record import StoredState
from services.scheduler.core.recovery import join
from services.scheduler.core.replica import Replica
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.sequence import Sequence
from tessera.values.identity import Epoch

NUMBERS = range(1, 9)
PROMPT_LEN = 20
GAP_MAX = 5
"""Turns without a token: two batches in flight when it moves, its prompt of a step's third, and two batches until the output is told."""


def filled_rig(num_workers: int = 2, num_blocks: int = 80) -> FleetRig:
    """Eight requests in decode, over all workers."""
    rig = FleetRig(num_workers, num_blocks)
    for number in NUMBERS:
        rig.submit(number, [number * 100 + at for at in range(PROMPT_LEN)], max_tokens=40)
    for _ in range(6):
        rig.turn()
    return rig


def rig_with_one_swapped() -> tuple[FleetRig, Replica, Sequence]:
    """Three requests and a single worker with room for two; its replica, and the sequence that is swapped out."""
    rig = FleetRig(num_workers=0, num_host_blocks=40, preemption_mode="swap")
    rig.join("worker:0", num_blocks=14)
    for number in (1, 2, 3):
        rig.submit(number, [number * 100 + at for at in range(10)], max_tokens=30)
    replica = replica_of(rig)
    while not replica.swapped:
        rig.turn()
    (swapped,) = replica.swapped.values()
    return rig, replica, swapped


def replica_of(rig: FleetRig) -> Replica:
    replica = rig.scheduler.replica("worker:0")
    assert replica is not None
    return replica


def workers_of(rig: FleetRig) -> set[str]:
    return {rig.sequence(number).worker for number in NUMBERS} - {""}


def assert_all_as_alone(rig: FleetRig) -> None:
    rig.finish_all()
    for number in NUMBERS:
        rig.assert_as_alone(number)


def test_requests_of_a_leaving_worker_move_a_few_at_a_time() -> None:
    rig = filled_rig()
    leaving = replica_of(rig)
    assert len(leaving.running) == 4
    rig.scheduler.worker_leaves("worker:0")
    lens = {number: rig.sequence(number).output_len for number in NUMBERS}
    silent = dict.fromkeys(NUMBERS, 0)
    longest, turns = 0, 0
    while leaving.running or rig.workers["worker:0"].slots:
        pending = sum(rig.sequence(number).ledger.num_tokens for number in NUMBERS if not rig.sequence(number).worker)
        assert pending <= LIMITS.max_num_batched_tokens, "more is on its way than one step computes"
        rig.turn()
        turns += 1
        assert turns < 60, "it is never done"
        for number in NUMBERS:
            sequence = rig.sequence(number)
            is_silent = sequence.finish is None and sequence.output_len == lens[number]
            silent[number] = silent[number] + 1 if is_silent else 0
            lens[number] = sequence.output_len
            longest = max(longest, silent[number])
    assert longest <= GAP_MAX
    assert any(rig.sequence(number).finish is None for number in NUMBERS), "they moved before they ended"
    assert workers_of(rig) == {"worker:1"}
    assert_all_as_alone(rig)


def test_nobody_new_comes_to_a_leaving_worker() -> None:
    rig = filled_rig()
    rig.scheduler.worker_leaves("worker:0")
    new = [rig.submit(number, [number, 7, 7], max_tokens=4) for number in range(20, 26)]
    rig.turn()
    assert {sequence.worker for sequence in new} == {"worker:1"}
    assert_all_as_alone(rig)


def test_without_another_worker_requests_end_where_they_are() -> None:
    rig = filled_rig(num_workers=1, num_blocks=160)
    rig.scheduler.worker_leaves("worker:0")
    assert_all_as_alone(rig)
    assert rig.scheduler.load().num_preemptions == 0


def test_what_fits_nowhere_else_stays_and_waits_for_the_workers_return() -> None:
    rig = FleetRig(1, num_blocks=80)
    rig.join("small", num_blocks=8)
    sequence = rig.submit(1, list(range(100, 150)), max_tokens=40)
    for _ in range(4):
        rig.turn()
    assert sequence.worker == "worker:0"
    rig.scheduler.worker_leaves("worker:0")
    for _ in range(5):
        rig.turn()
    assert sequence.worker == "worker:0" and sequence.finish is None
    rig.kill("worker:0")
    rig.attach("worker:0")
    rig.finish_all()
    rig.assert_as_alone(1)


def test_what_only_a_leaving_worker_can_hold_goes_to_another_that_comes() -> None:
    rig = FleetRig(1, num_blocks=80)
    rig.join("small", num_blocks=8)
    rig.scheduler.worker_leaves("worker:0")
    sequence = rig.submit(1, list(range(100, 150)), max_tokens=4)
    assert not rig.turn(), "it waits for the return of the only one that holds it"
    rig.join("large", num_blocks=80)
    rig.turn()
    assert sequence.worker == "large"
    rig.finish_all()
    rig.assert_as_alone(1)


def test_nobody_moves_to_a_worker_with_more_requests_than_a_new_leader_allows() -> None:
    rig = filled_rig()
    rig.epoch, rig.config = Epoch(2, b"leader"), replace(rig.config, max_num_seqs=2)
    reports = {name: worker.attach(rig.epoch, 1) for name, worker in rig.workers.items()}
    rig.scheduler = Scheduler(rig.config, rig.epoch)
    rig.scheduler.restore(join(rig.state, reports, [], own_stop), reports, rig.now_us)
    rig.state = StoredState()
    rig.scheduler.worker_leaves("worker:0")
    rig.turn()
    assert rig.scheduler.load().num_waiting == 0, "they would only wait"
    assert_all_as_alone(rig)


def test_a_worker_that_comes_back_takes_requests_again() -> None:
    rig = filled_rig()
    rig.scheduler.worker_leaves("worker:0")
    for _ in range(3):
        rig.turn()
    rig.kill("worker:0")
    rig.attach("worker:0")
    new = [rig.submit(number, [number, 7, 7], max_tokens=4) for number in range(20, 28)]
    rig.turn()
    assert "worker:0" in {sequence.worker for sequence in new}
    assert_all_as_alone(rig)


def test_swapped_requests_of_a_leaving_worker_move_as_well() -> None:
    """They go first: they wait for room here, and there is some elsewhere."""
    rig, leaving, swapped = rig_with_one_swapped()
    rig.join("worker:1", num_blocks=40)
    rig.scheduler.worker_leaves("worker:0")
    rig.turn()
    assert swapped.worker == "worker:1" and not leaving.swapped
    assert leaving.manager.num_free_host_blocks == 40
    rig.finish_all()
    for number in (1, 2, 3):
        rig.assert_as_alone(number)


def test_a_swapped_request_that_fits_nowhere_else_comes_back_where_it_is() -> None:
    rig, leaving, swapped = rig_with_one_swapped()
    rig.join("worker:1", num_blocks=4)
    rig.scheduler.worker_leaves("worker:0")
    while leaving.swapped:
        rig.turn()
    assert swapped.worker == "worker:0" and swapped.attempt == 1
    rig.finish_all()
    for number in (1, 2, 3):
        rig.assert_as_alone(number)
