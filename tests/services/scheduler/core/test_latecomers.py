"""A prompt that comes while all batches are out need not wait for both: one more batch may leave, of prompts alone, which joins the one that waits."""

from dataclasses import replace
from typing import Any

import pytest
from engine_worker import EngineWorker, greedy_output
from fake_worker import FakeWorker
from scheduler_rig import Rig

from tessera.values.config import Config
from tessera.values.model import WorkerLimits

LIMITS = WorkerLimits(max_num_seqs=8, max_num_batched_tokens=64)


def rig_of(limits: WorkerLimits = LIMITS, **config: Any) -> Rig:
    return Rig(
        Config(**{"max_num_seqs": 4, "max_num_batched_tokens": 32, "itl_target_ms": 0, **config}), FakeWorker(100, 4, limits)
    )


def with_both_out(rig: Rig) -> Rig:
    """One request decodes; a batch runs, and one waits."""
    rig.submit(1, [10, 11, 12], max_tokens=30)
    rig.step()
    assert rig.schedule() is not None and rig.schedule() is not None
    return rig


def time_prompts(rig: Rig) -> None:
    """A prompt has taken so long that the least chunk is all that fits a millisecond."""
    replica = rig.scheduler.replica("worker:1")
    assert replica is not None
    replica.step_times.answered(0, 4, 1_000, 1_000)


def test_a_prompt_that_comes_late_leaves_at_once() -> None:
    rig = with_both_out(rig_of())
    assert rig.schedule() is None
    assert not rig.scheduler.is_busy, "a late prompt can be given to somebody"
    rig.submit(2, [20, 21, 22, 23, 24])
    late = rig.schedule()
    assert late is not None and late.num_decodes == 0 and late.num_scheduled_tokens.tolist() == [5]
    assert [entry.request_id[-1] for entry in late.entries] == [2]


def test_only_one_batch_of_latecomers_is_out_at_a_time() -> None:
    rig = with_both_out(rig_of())
    rig.submit(2, [20, 21, 22])
    assert rig.schedule() is not None
    rig.submit(3, [30, 31, 32])
    assert rig.scheduler.is_busy and rig.schedule() is None
    rig.post(rig.execute())  # the one that ran; now the joined one runs
    mixed = rig.schedule()
    assert mixed is not None and mixed.num_decodes == 2 and mixed.num_scheduled_tokens.tolist() == [1, 1, 3]
    assert rig.scheduler.is_busy and rig.schedule() is None


def test_another_batch_follows_behind_the_latecomers() -> None:
    """The worker must not run dry while it computes the two that joined."""
    rig = with_both_out(rig_of())
    rig.submit(2, [20, 21, 22])
    rig.schedule()
    rig.post(rig.execute())
    behind = rig.schedule()
    assert behind is not None and behind.num_decodes == 2
    rig.finish_all(3)
    assert len(rig.output(1)) == 30


def test_latecomers_share_the_budget_with_the_batch_that_they_join() -> None:
    rig = with_both_out(rig_of(max_num_batched_tokens=8))
    rig.submit(2, list(range(10, 30)))
    late = rig.schedule()
    assert late is not None and late.num_scheduled_tokens.tolist() == [7]


def test_latecomers_take_no_seat_that_the_batch_has() -> None:
    rig = rig_of(max_num_seqs=2)
    for number in (1, 2):
        rig.submit(number, [10 + number, 11, 12], max_tokens=30)
    rig.step()
    assert rig.schedule() is not None and rig.schedule() is not None
    rig.submit(3, [30, 31, 32])
    assert rig.schedule() is None


def test_prompts_of_latecomers_are_paced_as_all_are() -> None:
    rig = with_both_out(rig_of(itl_target_ms=1))
    time_prompts(rig)
    rig.submit(2, list(range(10, 50)))
    late = rig.schedule()
    assert late is not None and late.num_scheduled_tokens.tolist() == [16]


def test_a_step_and_its_latecomers_have_one_allowance() -> None:
    rig = with_both_out(rig_of(itl_target_ms=1))
    time_prompts(rig)
    rig.post(rig.execute())
    rig.submit(2, list(range(10, 50)))
    mixed = rig.schedule()
    assert mixed is not None and mixed.num_scheduled_tokens.tolist() == [1, 16]
    rig.submit(3, list(range(20, 60)))
    assert rig.schedule() is None


@pytest.mark.parametrize(
    ("limits", "config"),
    [
        (replace(LIMITS, max_batches_in_flight=2), {}),
        (LIMITS, {"policy": "prefill_first"}),
        (LIMITS, {"scheduler_delay_factor": 0.1}),
        (replace(LIMITS, num_speculative_tokens=2), {"num_speculative_tokens": 2}),
    ],
    ids=["a worker that takes no more", "steps of one kind", "prompts that wait on purpose", "drafts"],
)
def test_nobody_joins(limits: WorkerLimits, config: dict[str, Any]) -> None:
    rig = with_both_out(rig_of(limits, **config))
    rig.submit(2, [20, 21, 22])
    assert rig.schedule() is None


def test_one_batch_at_a_time_is_one_batch_at_a_time() -> None:
    rig = rig_of(max_batches_in_flight=1)
    rig.submit(1, [10, 11, 12], max_tokens=30)
    assert rig.schedule() is not None
    rig.submit(2, [20, 21, 22])
    assert rig.schedule() is None and rig.scheduler.is_busy


def test_orders_alone_are_no_reason_for_one_more() -> None:
    rig = with_both_out(rig_of())
    rig.scheduler.abort((1).to_bytes(16, "big"), rig.now_us)
    assert rig.schedule() is None
    rig.submit(2, [20, 21, 22])
    late = rig.schedule()
    assert late is not None and [drop.slot for drop in late.drops] == [0]  # so it does not join


@pytest.mark.parametrize("steps", range(1, 8))
def test_whoever_comes_late_has_its_own_tokens(steps: int) -> None:
    """A real engine, that computes both in one pass."""
    worker = EngineWorker(100, 4, LIMITS)
    rig = Rig(Config(max_num_seqs=4, max_num_batched_tokens=32), worker)
    rig.submit(1, [10, 11, 12], max_tokens=20)
    for _ in range(steps):
        rig.step(2)
    while len(worker.queue) < 2:
        rig.schedule()
    rig.submit(2, [20, 21, 22, 23], max_tokens=20)
    rig.schedule()
    rig.finish_all(3)
    assert worker.num_joined == 1
    assert rig.output(1) == greedy_output([10, 11, 12], 20) and rig.output(2) == greedy_output([20, 21, 22, 23], 20)
    assert rig.free_blocks == 100 and worker.engine.num_slots_held == 0
