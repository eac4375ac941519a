"""Requests that bring workers down end alone, and nobody else does, however often workers are killed."""

import random

import pytest
from fleet_rig import BROKEN, FleetRig

from services.scheduler.core.sequence_status import SequenceStatus
from services.scheduler.core.worker_loss import LEFT, LossKind, WorkerLoss
from tessera.values.batch import ScheduledBatch
from tessera.values.finish import FinishReason

NEIGHBOURS = range(1, 9)
POISON = 9


def rig_with(num_workers: int = 1, prompt_len: int = 5, **config: object) -> FleetRig:
    """Eight neighbours and request 9 behind them."""
    rig = FleetRig(num_workers, 80, **config)
    for number in NEIGHBOURS:
        rig.submit(number, [number, 20 + number, 30], max_tokens=12)
    rig.submit(POISON, [60] * prompt_len, max_tokens=12)
    return rig


def assert_isolated(rig: FleetRig) -> None:
    finish = rig.sequence(POISON).finish
    assert finish is not None and finish.reason is FinishReason.ERROR
    assert finish.message == "no worker can compute this request: the stream broke, 2 times with nothing else to do"
    for number in NEIGHBOURS:
        rig.assert_as_alone(number)


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize(
    ("prompt_len", "position"), [(5, 0), (5, 4), (5, 9), (40, 30)], ids=["first", "whole prompt", "decode", "later chunk"]
)
def test_a_poison_request_ends_and_its_neighbours_go_on(num_workers: int, prompt_len: int, position: int) -> None:
    rig = rig_with(num_workers, prompt_len, max_num_batched_tokens=16)
    rig.poison[POISON.to_bytes(16, "big")] = position
    rig.finish_all()
    assert_isolated(rig)
    assert rig.num_killed == 4, "twice in company, twice alone"
    assert not rig.scheduler._lifecycle.suspects


def test_its_tokens_before_the_poison_are_kept() -> None:
    rig = rig_with()
    rig.poison[POISON.to_bytes(16, "big")] = 9
    rig.finish_all()
    assert rig.sequence(POISON).output_len == 5  # position 9 samples the sixth


def test_two_poison_requests_at_once() -> None:
    rig = rig_with(2)
    rig.submit(10, [61] * 4, max_tokens=12)
    for number in (POISON, 10):
        rig.poison[number.to_bytes(16, "big")] = 2
    rig.finish_all()
    assert_isolated(rig)
    finish = rig.sequence(10).finish
    assert finish is not None and finish.reason is FinishReason.ERROR
    assert rig.num_killed <= 8


def test_a_batch_of_a_suspect_holds_nobody_else_and_the_others_go_on_behind_it() -> None:
    rig = rig_with()
    for _ in range(2):
        batch = rig.schedule("worker:0")
        assert batch is not None and batch.num_rows == 9
        rig.kill("worker:0")
        rig.attach("worker:0")
    for expected in (1, 2, 3):  # the oldest first
        batch = rig.schedule("worker:0")
        assert batch is not None and [entry.request_id[-1] for entry in batch.entries] == [expected] and batch.num_rows == 1
        assert rig.schedule("worker:0") is None, "and nothing behind it before it has passed"
        rig.execute("worker:0")
    rig.finish_all()
    for number in (*NEIGHBOURS, POISON):
        rig.assert_as_alone(number)


@pytest.mark.parametrize("seed", range(20))
def test_random_kills_end_no_innocent_request(seed: int) -> None:
    """A kill in every fifth turn, with batches in flight: progress clears everybody."""
    moments = random.Random(seed)
    rig = rig_with(2, max_num_batched_tokens=32)
    for _ in range(60):
        rig.turn(in_flight=moments.choice((1, 2)))
        for name in rig.workers:
            if moments.random() < 0.1:
                while moments.random() < 0.5 and rig.schedule(name) is not None:
                    pass
                rig.kill(name)
                rig.attach(name)
    rig.finish_all()
    for number in (*NEIGHBOURS, POISON):
        rig.assert_as_alone(number)


def test_a_request_that_is_alone_anyway_is_tried_no_less_often() -> None:
    rig = FleetRig(1)
    sequence = rig.submit(1, [1, 2, 3], max_tokens=3)
    for _ in range(3):
        rig.schedule("worker:0")
        rig.kill("worker:0")
        rig.attach("worker:0")
    assert sequence.finish is None
    rig.finish_all()
    rig.assert_as_alone(1)


def test_a_long_prefill_that_is_killed_in_other_places_is_no_suspect() -> None:
    """Every loss lies in another chunk: no single position can be the cause."""
    rig = FleetRig(1, 80, max_num_batched_tokens=8, max_num_seqs=4)
    sequence = rig.submit(1, [1] * 60, max_tokens=3)
    for executed in (0, 2, 4, 1, 3, 5, 0, 2):
        for _ in range(executed):
            rig.schedule("worker:0")
            rig.execute("worker:0")
        rig.schedule("worker:0")
        rig.kill("worker:0")
        rig.attach("worker:0")
    assert sequence.finish is None
    rig.finish_all()
    rig.assert_as_alone(1)


def test_workers_that_were_only_cut_off_accuse_nobody() -> None:
    rig = rig_with()
    for _ in range(10):
        rig.schedule("worker:0")
        rig.workers["worker:0"].queue.clear()  # it never got there
        rig.lose("worker:0")
        rig.attach("worker:0")
    assert not rig.scheduler._lifecycle.suspects
    rig.finish_all()
    for number in (*NEIGHBOURS, POISON):
        rig.assert_as_alone(number)


def test_workers_that_shut_down_accuse_nobody() -> None:
    rig = rig_with()
    for _ in range(10):
        rig.schedule("worker:0")
        rig.workers["worker:0"].restart()
        rig.lose("worker:0", LEFT)
        rig.attach("worker:0")
    rig.finish_all()
    for number in (*NEIGHBOURS, POISON):
        rig.assert_as_alone(number)


def refusing_rig() -> FleetRig:
    """The worker refuses every batch that enters or computes the poison request."""
    rig = rig_with()
    worker = rig.workers["worker:0"]
    enqueue = worker.enqueue

    def checked(batch: ScheduledBatch) -> None:
        poison = POISON.to_bytes(16, "big")
        if poison in (entry.request_id for entry in batch.entries):
            worker.queue.clear()
            rig.num_killed += 1
            rig.scheduler.lose_worker("worker:0", WorkerLoss(LossKind.REFUSED, batch.step_id, "a bad row"), rig.now_us)
            rig.attach("worker:0")
        else:
            enqueue(batch)

    worker.enqueue = checked  # type: ignore[method-assign]
    return rig


def test_a_request_whose_batches_are_refused_ends_and_its_neighbours_go_on() -> None:
    rig = refusing_rig()
    rig.finish_all()
    finish = rig.sequence(POISON).finish
    assert finish is not None and finish.reason is FinishReason.ERROR and "a bad row" in finish.message
    for number in NEIGHBOURS:
        rig.assert_as_alone(number)
    assert rig.num_killed == 4, "a refusal does not go on for ever"


def test_a_refused_batch_accuses_only_its_own_rows() -> None:
    rig = FleetRig(1, 80)
    rig.submit(1, [1, 2, 3], max_tokens=5)
    first = rig.schedule("worker:0")
    rig.submit(2, [4, 5, 6], max_tokens=5)
    second = rig.schedule("worker:0")
    assert first is not None and second is not None
    rig.lose("worker:0", WorkerLoss(LossKind.REFUSED, second.step_id))
    assert {key[-1] for key in rig.scheduler._lifecycle.suspects._suspicions} == {1, 2}
    rig.attach("worker:0")
    rig.finish_all()


def test_an_abort_ends_a_suspicion() -> None:
    rig = rig_with()
    for _ in range(2):
        rig.schedule("worker:0")
        rig.kill("worker:0")
        rig.attach("worker:0")
    for number in (*NEIGHBOURS, POISON):
        rig.scheduler.abort(number.to_bytes(16, "big"), rig.now_us)
        rig.check()
    assert not rig.scheduler._lifecycle.suspects


def test_suspects_on_several_workers_are_tried_side_by_side() -> None:
    rig = rig_with(2)
    for _ in range(2):
        for name in rig.workers:
            rig.schedule(name)
        for name in rig.workers:
            rig.kill(name)
        for name in rig.workers:
            rig.attach(name)
    batches = [rig.schedule(name) for name in rig.workers]
    assert [batch.num_rows for batch in batches if batch is not None] == [1, 1]
    rig.finish_all()
    for number in (*NEIGHBOURS, POISON):
        rig.assert_as_alone(number)


def test_a_suspect_without_room_holds_up_no_one_who_runs() -> None:
    """Who runs goes on until the suspect fits: it is not tried before there are blocks for it."""
    rig = FleetRig(1, 16)
    rig.submit(1, [1] * 30, max_tokens=2)
    for _ in range(2):
        rig.schedule("worker:0")
        rig.kill("worker:0")
        rig.attach("worker:0")
    rig.submit(2, [2] * 20, max_tokens=20)
    rig.finish_all()
    for number in (1, 2):
        rig.assert_as_alone(number)


def test_the_loss_of_a_worker_that_is_already_lost_says_nothing() -> None:
    rig = rig_with()
    rig.schedule("worker:0")
    for _ in range(5):
        rig.lose("worker:0", BROKEN)
    assert all(rig.sequence(number).status is SequenceStatus.WAITING for number in NEIGHBOURS)
    assert not rig.scheduler._lifecycle.suspects.strong
