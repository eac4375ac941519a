"""Limits of time: what is too late ends with the limit's name, and gives back what it held, whoever leads."""

import pytest
from fake_worker import FakeWorker
from scheduler_rig import WORKER, Rig, own_stop

from services.scheduler.core.record import StoredState
from services.scheduler.core.recovery import join
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.sequence import Sequence
from tessera.values.config import Config
from tessera.values.finish import Finish, FinishReason
from tessera.values.identity import Epoch
from tessera.values.request import TimeLimits


def rig_of(max_num_seqs: int = 1) -> Rig:
    return Rig(Config(max_num_seqs=max_num_seqs, max_num_batched_tokens=8), FakeWorker(20, 4))


def wait(rig: Rig, ms: int) -> None:
    rig.now_us += 1000 * ms
    rig.scheduler.end_late(rig.now_us)
    rig.check()


def end_of(sequence: Sequence) -> tuple[FinishReason, str, int] | None:
    finish = sequence.finish
    return None if finish is None else (finish.reason, finish.limit, finish.output_len)


def test_who_waits_too_long_for_his_turn_goes_and_who_had_it_stays() -> None:
    rig = rig_of()
    rig.submit(1, [1, 2], max_tokens=50, limits=TimeLimits(max_queue_ms=5))
    rig.step()
    rig.submit(2, [3, 4], max_tokens=50, limits=TimeLimits(max_queue_ms=5))
    wait(rig, 4)
    assert rig.sequence(2).finish is None
    wait(rig, 1)
    assert rig.sequence(2).finish == Finish(
        FinishReason.DEADLINE, 0, message="the request was not scheduled within 5 ms", limit="max_queue_ms"
    )
    wait(rig, 100)
    rig.finish_all()
    assert rig.reason(1) is FinishReason.MAX_TOKENS
    rig.assert_as_alone(1)


@pytest.mark.parametrize(
    ("limits", "end"),
    [
        (TimeLimits(max_first_token_ms=10), None),
        (TimeLimits(max_total_ms=10), (FinishReason.DEADLINE, "max_total_ms", 2)),
        (TimeLimits(deadline_ms=10), (FinishReason.DEADLINE, "deadline_ms", 2)),
        (TimeLimits(1, 1, 10, 9), (FinishReason.DEADLINE, "deadline_ms", 2)),
    ],
)
def test_what_runs_ends_with_its_tokens_and_frees_its_blocks(
    limits: TimeLimits, end: tuple[FinishReason, str, int] | None
) -> None:
    rig = rig_of(2)
    rig.submit(1, [1, 2, 3], max_tokens=9, limits=limits)
    rig.submit(2, [7, 8], max_tokens=9)
    rig.step()
    rig.step(in_flight=2)
    output = rig.output(1)
    wait(rig, 10)
    assert end_of(rig.sequence(1)) == end
    rig.finish_all()
    assert rig.output(1)[: len(output)] == output
    assert rig.free_blocks == 20 and not rig.worker.slots
    rig.assert_as_alone(2)


def test_a_prompt_that_takes_too_long_has_no_first_token() -> None:
    rig = rig_of()
    rig.submit(1, list(range(40)), max_tokens=9, limits=TimeLimits(max_queue_ms=1, max_first_token_ms=10))
    rig.step()
    wait(rig, 10)
    assert end_of(rig.sequence(1)) == (FinishReason.DEADLINE, "max_first_token_ms", 0)


def test_a_next_leader_goes_on_with_the_time_that_is_known_to_have_passed() -> None:
    rig = rig_of()
    rig.submit(1, [1, 2], max_tokens=30, limits=TimeLimits(max_total_ms=50))
    rig.step()
    known_us = rig.sequence(1).timings.ttft_us
    assert known_us == 1000
    epoch = Epoch(rig.epoch.number + 1, b"leader")
    reports = {WORKER: rig.worker.attach(epoch, rig.nonce + 1)}
    rig.scheduler = Scheduler(rig.config, epoch)
    rig.scheduler.restore(join(rig.state, reports, [], own_stop), reports, rig.now_us)
    rig.state = StoredState()
    rig.check()
    wait(rig, 48)
    assert rig.sequence(1).finish is None
    wait(rig, 1)
    assert end_of(rig.sequence(1)) == (FinishReason.DEADLINE, "max_total_ms", len(rig.output(1)))
