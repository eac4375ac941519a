"""Promised lengths: what a request may grow to holds whoever leads and whichever pools are there; what nobody can hold waits, and ends loudly."""

from dataclasses import replace

import pytest
from fake_worker import MODEL, reference_output
from fleet_rig import FleetRig
from scheduler_rig import own_stop, submission

from services.scheduler.core.admission import Admitted
from services.scheduler.core.capacity_watch import LOOK_EVERY_US, Shortage
from services.scheduler.core.record import StoredState
from services.scheduler.core.recovery import join
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.sequence_status import SequenceStatus
from services.scheduler.core.worker_loss import LEFT
from tessera.values.finish import FinishReason
from tessera.values.identity import Epoch

WAIT_MS = 60_000


def fleet(wait_ms: int = WAIT_MS) -> FleetRig:
    """A small worker of 6 blocks of 4 tokens and a large one of 15: requests of at most 61 tokens."""
    rig = FleetRig(0, capacity_wait_ms=wait_ms)
    rig.join("small", 6)
    rig.join("large", 15)
    return rig


def take_over(rig: FleetRig, *there: str) -> None:
    """The next leader, which these workers answer in time."""
    rig.epoch = Epoch(rig.epoch.number + 1, b"leader")
    rig.nonce += 1
    reports = {name: rig.workers[name].attach(rig.epoch, rig.nonce) for name in there}
    rig.scheduler = Scheduler(rig.config, rig.epoch)
    rig.scheduler.restore(join(rig.state, reports, [], own_stop), reports, rig.now_us)
    rig.state = StoredState()
    rig.check()


def turns(rig: FleetRig, count: int, *names: str) -> None:
    """So many turns of these workers alone."""
    workers = rig.workers
    rig.workers = {name: workers[name] for name in names}
    for _ in range(count):
        rig.turn()
    rig.workers = workers


def pass_ms(rig: FleetRig, ms: int) -> Shortage | None:
    rig.now_us += 1000 * ms
    shortage = rig.scheduler.end_unheld(rig.now_us)
    rig.check()
    return shortage


def test_a_new_leader_keeps_what_was_promised_though_the_largest_worker_is_away() -> None:
    rig = fleet()
    rig.submit(1, [1] * 20, max_tokens=40)
    rig.submit(2, [2] * 20, max_tokens=60)  # more than the pool holds: ends at 61 tokens
    rig.submit(3, [3] * 3, max_tokens=2)
    rig.turn()
    rig.turn()
    lens = {number: rig.sequence(number).output_len for number in (1, 2)}
    assert {rig.sequence(1).worker, rig.sequence(2).worker} == {"large"} and all(lens.values())
    take_over(rig, "small")
    turns(rig, 5, "small")
    rig.assert_as_alone(3)
    for number in (1, 2):
        sequence = rig.sequence(number)
        assert (sequence.status, sequence.output_len) == (SequenceStatus.WAITING, lens[number])
    assert [rig.sequence(number).tokens_max for number in (1, 2)] == [60, 61]
    rig.attach("large")
    rig.finish_all()
    rig.assert_as_alone(1)
    expected, finish = reference_output(rig.sequence(2).submission, 60)
    assert (list(rig.sequence(2).output_token_ids()), rig.sequence(2).finish) == (expected, finish)
    assert finish.reason is FinishReason.MAX_MODEL_LEN and len(expected) == 41


def test_the_second_leader_after_it_keeps_it_too() -> None:
    rig = fleet()
    rig.submit(1, [1] * 20, max_tokens=40)
    rig.turn()
    take_over(rig, "small")
    take_over(rig, "small")
    assert rig.sequence(1).tokens_max == 60
    take_over(rig, "small", "large")
    rig.finish_all()
    rig.assert_as_alone(1)


def test_a_larger_worker_that_joins_is_a_promise_that_a_new_leader_keeps() -> None:
    rig = FleetRig(0)
    rig.join("small", 6)
    rig.submit(1, [1] * 20, max_tokens=40)
    assert rig.sequence(1).tokens_max == 25
    rig.join("large", 15)
    assert rig.sequence(1).tokens_max == 60
    take_over(rig, "small")
    assert rig.sequence(1).finish is None and rig.sequence(1).tokens_max == 60


def test_what_no_worker_that_is_there_can_hold_is_told_and_ends_with_an_error_that_names_the_blocks() -> None:
    rig = fleet()
    rig.submit(1, [1] * 20, max_tokens=40)
    rig.submit(2, [2] * 4, max_tokens=4)
    rig.turn()
    rig.turn()
    shown = rig.sequence(1).output_token_ids()
    assert pass_ms(rig, 0) is None
    rig.lose("large")
    assert pass_ms(rig, 1000) == Shortage(blocks_needed=15, blocks_there=6)
    turns(rig, 8, "small")
    rig.assert_as_alone(2)
    assert pass_ms(rig, WAIT_MS - 1000) == Shortage(15, 6) and rig.sequence(1).finish is None
    pass_ms(rig, 1000)
    finish = rig.sequence(1).finish
    assert finish is not None and finish.reason is FinishReason.ERROR and finish.output_len == len(shown) > 0
    assert "15 blocks" in finish.message and "has 6," in finish.message and "60000 ms" in finish.message
    assert rig.sequence(1).output_token_ids() == shown
    assert pass_ms(rig, 1000) is None


def test_the_worker_that_comes_in_time_computes_it_to_its_end() -> None:
    rig = fleet()
    rig.submit(1, [1] * 20, max_tokens=40)
    rig.turn()
    rig.lose("large")
    pass_ms(rig, 1000)
    pass_ms(rig, WAIT_MS - 1000)
    rig.attach("large")
    assert pass_ms(rig, 1000) is None
    rig.lose("large")
    pass_ms(rig, 1000)
    pass_ms(rig, WAIT_MS - 1000)
    assert rig.sequence(1).finish is None, "its time begins anew"
    rig.attach("large")
    rig.finish_all()
    rig.assert_as_alone(1)


def test_a_restart_with_a_smaller_pool_under_a_new_leader_is_the_same() -> None:
    rig = FleetRig(0, capacity_wait_ms=WAIT_MS)
    rig.join("only", 15)
    rig.submit(1, [1] * 20, max_tokens=40)
    rig.submit(2, [2] * 4, max_tokens=8)
    rig.turn()
    rig.workers["only"].geometry = replace(rig.workers["only"].geometry, num_blocks=6)
    rig.workers["only"].restart()
    take_over(rig, "only")
    assert rig.sequence(1).finish is None and rig.sequence(1).output_len > 0
    for _ in range(12):
        rig.turn()
    rig.assert_as_alone(2)
    pass_ms(rig, 0)
    pass_ms(rig, WAIT_MS)
    finish = rig.sequence(1).finish
    assert finish is not None and finish.reason is FinishReason.ERROR


def test_for_ever_is_for_ever() -> None:
    rig = fleet(wait_ms=0)
    rig.submit(1, [1] * 20, max_tokens=40)
    rig.lose("large")
    pass_ms(rig, 1000)
    assert pass_ms(rig, 2**31) == Shortage(15, 6)
    assert rig.sequence(1).finish is None


@pytest.mark.parametrize("how", ["lost", "leaves"])
def test_nobodys_time_runs_while_no_worker_is_there(how: str) -> None:
    rig = fleet()
    rig.submit(1, [1] * 20, max_tokens=40)
    rig.lose("large")
    pass_ms(rig, 1000)
    if how == "lost":
        rig.lose("small", LEFT)
    else:
        rig.scheduler.worker_leaves("small")
    assert pass_ms(rig, 10 * WAIT_MS) is None and rig.sequence(1).finish is None
    rig.attach("small")
    pass_ms(rig, 1000)
    pass_ms(rig, WAIT_MS - 1000)
    assert rig.sequence(1).finish is None


def test_what_a_leaving_worker_computes_still_goes_on() -> None:
    rig = fleet()
    rig.submit(1, [1] * 20, max_tokens=40)
    rig.turn()
    rig.scheduler.worker_leaves("large")
    pass_ms(rig, 1000)
    assert pass_ms(rig, 2 * WAIT_MS) is None
    rig.finish_all()
    rig.assert_as_alone(1)


def test_a_look_costs_a_pass_over_the_queue_and_comes_once_a_second() -> None:
    rig = fleet()
    rig.submit(1, [1] * 20, max_tokens=40)
    assert pass_ms(rig, 0) is None
    rig.lose("large")
    assert pass_ms(rig, LOOK_EVERY_US // 1000 - 1) is None
    assert pass_ms(rig, 1) == Shortage(15, 6)


def test_a_resume_of_more_than_anybody_here_holds_waits_for_who_held_it() -> None:
    """Everybody but its client has lost the request: nobody knows what it was promised, but more than is here."""
    rig = fleet()
    request = submission(1, [1] * 20)
    expected, _ = reference_output(request, 60)
    rig = FleetRig(0, capacity_wait_ms=WAIT_MS)
    rig.join("small", 6)
    answer = rig.scheduler.submit(request, 1, tuple(expected[:10]), rig.now_us)
    assert answer == Admitted(request.request_id)
    rig.check()
    assert rig.sequence(1).finish is None and rig.sequence(1).tokens_max == MODEL.max_model_len
    rig.join("large", 16)
    rig.finish_all()
    rig.assert_as_alone(1)
