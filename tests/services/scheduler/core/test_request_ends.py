"""Ends that come from outside: aborts, stop strings found by a gateway, rows that fail."""

import pytest
from fake_worker import FakeWorker
from scheduler_rig import Rig

from tessera.values.config import Config
from tessera.values.finish import Finish, FinishReason

ID = (1).to_bytes(16, "big")


def numbers(count: int, first: int = 10) -> list[int]:
    return list(range(first, first + count))


def rig_of(budget: int = 8, **config: object) -> Rig:
    return Rig(Config(**{"max_num_seqs": 4, "max_num_batched_tokens": budget, **config}), FakeWorker(20, 4))


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("in_flight", [0, 1, 2])
def test_an_abort_frees_everything_in_every_state(num_steps: int, in_flight: int) -> None:
    """Cases 61, 62, 69: waiting, in a prefill, in decodes, with 0 to 2 batches on the way."""
    rig = rig_of()
    rig.submit(1, numbers(20), max_tokens=9)
    rig.submit(2, numbers(6, 40), max_tokens=9)
    for _ in range(num_steps):
        rig.step(max(1, in_flight))
    for _ in range(in_flight - len(rig.worker.queue)):
        rig.schedule()
    output = rig.output(1)
    rig.scheduler.abort(ID, rig.now_us)
    rig.check()
    rig.scheduler.abort(ID, rig.now_us)  # twice is once
    rig.check()
    assert rig.sequence(1).finish == Finish(FinishReason.ABORTED, len(output))
    rig.finish_all(in_flight=2)
    assert rig.output(1) == output
    assert rig.free_blocks == 20 and not rig.worker.slots
    rig.assert_as_alone(2)


def test_what_nobody_knows_can_be_aborted() -> None:
    rig = rig_of()
    rig.scheduler.abort(ID, rig.now_us)
    rig.scheduler.stop_found(ID, 1, "x", rig.now_us)
    assert rig.scheduler.take_changes() is None


def test_a_stop_string_cuts_what_came_behind_it() -> None:
    rig = rig_of()
    rig.submit(1, numbers(4), max_tokens=9)
    for _ in range(5):
        rig.step(in_flight=2)
    output = rig.output(1)
    assert len(output) == 5
    rig.scheduler.stop_found(ID, 3, "###", rig.now_us)
    rig.check()
    assert rig.sequence(1).finish == Finish(FinishReason.STOP_STRING, 3, stop_string="###")
    assert rig.output(1) == output[:3]
    assert list(rig.state.requests[ID].output_token_ids) == output[:3], "the journal cuts as well"
    rig.finish_all(in_flight=2)
    assert rig.output(1) == output[:3] and rig.free_blocks == 20


def test_the_earlier_of_a_stop_string_and_a_stop_found_here_wins() -> None:
    rig = rig_of()
    rig.submit(1, numbers(4), max_tokens=4)
    rig.finish_all(in_flight=2)
    output = rig.output(1)
    rig.scheduler.stop_found(ID, 5, "late", rig.now_us)
    assert rig.reason(1) is FinishReason.MAX_TOKENS
    rig.scheduler.stop_found(ID, 4, "same", rig.now_us)
    rig.check()
    assert rig.sequence(1).finish == Finish(FinishReason.STOP_STRING, 4, stop_string="same"), "a cap gives way"
    rig.scheduler.stop_found(ID, 2, "earlier", rig.now_us)
    rig.check()
    assert rig.sequence(1).finish == Finish(FinishReason.STOP_STRING, 2, stop_string="earlier")
    rig.scheduler.stop_found(ID, 3, "later", rig.now_us)
    rig.check()
    assert rig.output(1) == output[:2]


def test_a_stop_string_of_a_waiting_request_ends_it() -> None:
    rig = Rig(worker=FakeWorker(4, 4))
    rig.submit(1, numbers(7), max_tokens=5)
    rig.submit(2, numbers(7, 30), max_tokens=5)
    while rig.scheduler.load().num_waiting == 0 or not rig.output(2):
        rig.step()
    rig.scheduler.stop_found((2).to_bytes(16, "big"), 1, "x", rig.now_us)
    rig.check()
    assert rig.reason(2) is FinishReason.STOP_STRING
    rig.finish_all()
    rig.assert_as_alone(1)


@pytest.mark.parametrize("output_len", [0, 3])
def test_a_stop_string_beyond_the_tokens_is_ignored(output_len: int) -> None:
    rig = rig_of()
    rig.submit(1, numbers(4), max_tokens=4)
    rig.step()
    rig.step()
    rig.scheduler.stop_found(ID, output_len, "x", rig.now_us)
    rig.check()
    assert rig.sequence(1).finish is None


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_row_that_fails_ends_its_request_and_no_other(in_flight: int) -> None:
    rig = rig_of()
    for number in (1, 2, 3):
        rig.submit(number, numbers(4, 10 * number), max_tokens=6)
    for _ in range(3):
        rig.step(in_flight)
    output = rig.output(2)
    rig.worker.fail_next_row((2).to_bytes(16, "big"), "logits are not finite")
    rig.finish_all(in_flight)
    finish = rig.sequence(2).finish
    assert finish == Finish(FinishReason.ERROR, len(rig.output(2)), message="logits are not finite")
    assert rig.output(2)[: len(output)] == output
    rig.assert_as_alone(1)
    rig.assert_as_alone(3)
    assert rig.free_blocks == 20 and not rig.worker.slots


def test_the_finish_is_told_to_the_worker() -> None:
    rig = rig_of()
    rig.submit(1, numbers(4), max_tokens=2)
    rig.finish_all()
    (dropped,) = rig.worker.dropped
    assert (dropped.request_id, dropped.attempt, dropped.finish) == (ID, 1, Finish(FinishReason.MAX_TOKENS, 2))


def test_the_worker_forgets_dropped_slots_once_they_are_durable() -> None:
    rig = rig_of()
    rig.submit(1, numbers(4), max_tokens=2)
    rig.finish_all()
    replica = rig.scheduler.replica("worker:1")
    assert replica is not None and replica.applied_step == rig.batches[-1].step_id
    rig.scheduler.set_durable_step("worker:1", b"another boot", 100)
    rig.submit(2, numbers(4), max_tokens=2)
    rig.step()
    assert rig.batches[-1].durable_step == 0 and rig.worker.dropped
    rig.scheduler.set_durable_step("worker:1", replica.boot_id, replica.applied_step)
    rig.step()
    assert not rig.worker.dropped
