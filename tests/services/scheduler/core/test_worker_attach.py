"""A worker comes, breaks off, comes back, restarts, is lost: tokens stay, and what it holds is not computed again."""

from dataclasses import replace

import pytest
from fake_worker import FakeWorker, reference_output
from scheduler_rig import WORKER, Rig

from services.scheduler.core.capacity_watch import Shortage
from services.scheduler.core.errors import ModelMismatch
from services.scheduler.core.sequence_status import SequenceStatus
from services.scheduler.core.worker_loss import LEFT
from tessera.values.config import Config
from tessera.values.finish import FinishReason
from tessera.values.identity import Epoch
from tessera.values.model import KVGeometry


def numbers(count: int, first: int = 10) -> list[int]:
    return list(range(first, first + count))


def rig_of(num_blocks: int = 20, budget: int = 8, **config: object) -> Rig:
    return Rig(Config(**{"max_num_seqs": 4, "max_num_batched_tokens": budget, **config}), FakeWorker(num_blocks, 4))


def running_rig(num_steps: int = 4) -> Rig:
    """Two requests, one of them in decode, the other maybe still in its prefill; max_tokens 8."""
    rig = rig_of()
    rig.submit(1, numbers(5), max_tokens=8)
    rig.submit(2, numbers(18, 30), max_tokens=8)
    for _ in range(num_steps):
        rig.step(in_flight=2)
    return rig


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4, 6])
@pytest.mark.parametrize("executed", [0, 1, 2])
def test_a_broken_stream_costs_no_position_and_no_token(num_steps: int, executed: int) -> None:
    """Up to two batches are out; some were executed and their outputs lost, the others are discarded."""
    rig = running_rig(num_steps)
    while rig.schedule() is not None:
        pass
    for _ in range(executed):
        rig.execute()
    computed = rig.worker.computed_positions
    held = sum(slot.computed_len for slot in rig.worker.report().slots)
    assert held == computed
    before = rig.output(1)
    rig.attach()
    assert rig.output(1)[: len(before)] == before
    rig.finish_all(in_flight=2)
    for number in (1, 2):
        rig.assert_as_alone(number)
    assert rig.worker.computed_positions == (5 + 7) + (18 + 7), "every position once"


def test_a_stop_in_a_lost_output_is_found_in_the_slot() -> None:
    rig = rig_of()
    rig.submit(1, numbers(5), max_tokens=2)
    rig.step()
    rig.schedule()
    rig.execute()
    rig.attach()
    assert rig.reason(1) is FinishReason.MAX_TOKENS
    rig.assert_as_alone(1)
    assert rig.sequence(1).timings.ttft_us > 0
    rig.finish_all()
    assert not rig.worker.slots and rig.free_blocks == 20


def test_a_first_token_in_a_lost_output_counts_from_the_attach() -> None:
    rig = rig_of()
    rig.submit(1, numbers(5), max_tokens=4)
    rig.schedule()
    rig.execute()
    assert rig.sequence(1).timings.ttft_us == 0
    rig.attach()
    assert rig.sequence(1).timings.ttft_us == 1000 and len(rig.output(1)) == 1


def test_a_request_whose_entry_was_discarded_enters_again() -> None:
    rig = rig_of()
    rig.submit(1, numbers(5), max_tokens=3)
    rig.schedule()
    rig.attach()
    assert rig.sequence(1).status is SequenceStatus.WAITING
    batch = rig.schedule()
    assert batch is not None and batch.entries[0].attempt == 2 and batch.step_id == 2, "no step id comes twice"
    rig.finish_all()
    rig.assert_as_alone(1)


def test_a_discarded_preemption_is_taken_back() -> None:
    """The batch with the drop never started: the slot is still there, and goes on."""
    rig = Rig(worker=FakeWorker(4, 4))
    rig.submit(1, numbers(7), max_tokens=5)
    rig.submit(2, numbers(7, 30), max_tokens=5)
    rig.step()
    rig.step()
    batch = rig.schedule()
    assert batch is not None and batch.drops and rig.sequence(2).status is SequenceStatus.WAITING
    rig.attach()
    assert rig.sequence(2).status is SequenceStatus.RUNNING and rig.sequence(2).attempt == 1
    rig.finish_all()
    rig.assert_as_alone(1)
    rig.assert_as_alone(2)


def test_a_discarded_drop_is_sent_again() -> None:
    rig = rig_of()
    rig.submit(1, numbers(5))
    rig.step()
    rig.scheduler.abort((1).to_bytes(16, "big"), rig.now_us)
    rig.schedule()
    rig.attach()
    batch = rig.schedule()
    assert batch is not None and [drop.request_id[-1] for drop in batch.drops] == [1]
    assert batch.drops[0].finish == rig.sequence(1).finish
    rig.post(rig.execute())
    assert not rig.worker.slots


def test_a_restarted_worker_has_nothing_and_tokens_stay() -> None:
    """Cases 20, 80: no entry of the old boot can be hit, everything is computed again, no token comes twice."""
    rig = running_rig()
    late = rig.execute() if rig.worker.queue or rig.schedule() else None
    outputs = {number: rig.output(number) for number in (1, 2)}
    old_boot = next(iter(rig.state.blocks))
    assert rig.state.blocks[old_boot]
    rig.worker.restart()
    rig.attach()
    assert all(rig.sequence(number).status is SequenceStatus.WAITING for number in (1, 2))
    assert [boot for boot in rig.state.blocks] != [old_boot] and not any(rig.state.blocks.values())
    batch = rig.schedule()
    assert batch is not None and batch.step_id == 1
    assert [entry.num_cached_tokens for entry in batch.entries] == [0]
    assert late is not None
    rig.post(replace(late, step_id=1))  # of the old boot, though its step would fit
    assert {number: rig.output(number) for number in (1, 2)} == outputs
    rig.finish_all(in_flight=2)
    entered = [entry.request_id[-1] for issued in rig.batches for entry in issued.entries]
    assert entered == [1, 2, 1, 2], "in their old order"
    rig.assert_as_alone(1)
    rig.assert_as_alone(2)


def test_a_lost_worker_gets_no_batches_and_its_requests_wait_in_order() -> None:
    rig = running_rig()
    late = rig.execute()
    rig.scheduler.lose_worker(WORKER, LEFT, rig.now_us)
    rig.check()
    assert rig.schedule() is None and rig.scheduler.load().num_waiting == 2
    output = rig.output(1)
    rig.post(late)
    assert rig.output(1) == output
    rig.submit(3, numbers(3, 60), max_tokens=2)
    rig.scheduler.lose_worker(WORKER, LEFT, rig.now_us)
    rig.scheduler.lose_worker("nobody", LEFT, rig.now_us)
    rig.worker.restart()
    rig.attach()
    rig.finish_all(in_flight=2)
    entered = [entry.request_id[-1] for batch in rig.batches for entry in batch.entries]
    assert entered == [1, 2, 1, 2, 3], "those that ran come first"
    for number in (1, 2, 3):
        rig.assert_as_alone(number)


def test_a_worker_that_was_only_thought_lost_goes_on_where_it_was() -> None:
    rig = running_rig()
    rig.scheduler.lose_worker(WORKER, LEFT, rig.now_us)
    rig.check()
    rig.attach()
    assert all(rig.sequence(number).status is SequenceStatus.RUNNING for number in (1, 2))
    rig.finish_all(in_flight=2)
    assert rig.worker.computed_positions == (5 + 7) + (18 + 7)


def test_the_prefix_cache_of_a_worker_that_comes_back_holds() -> None:
    rig = rig_of()
    rig.submit(1, numbers(9), max_tokens=1)
    rig.finish_all()
    rig.scheduler.lose_worker(WORKER, LEFT, rig.now_us)
    rig.attach()
    rig.submit(2, numbers(9), max_tokens=1)
    rig.finish_all()
    assert rig.sequence(2).num_cached_tokens == 8
    rig.assert_as_alone(2)


def test_what_a_slot_computed_unknown_to_the_scheduler_is_published() -> None:
    """The output that completed the blocks was lost, and so was the request: its blocks can be hit all the same."""
    rig = rig_of()
    rig.submit(1, numbers(9), max_tokens=3)
    rig.schedule()
    rig.execute()
    rig.scheduler.abort((1).to_bytes(16, "big"), rig.now_us)
    rig.attach()
    rig.submit(2, numbers(9), max_tokens=1)
    rig.finish_all()
    assert rig.sequence(2).num_cached_tokens == 8
    rig.assert_as_alone(2)


def test_a_worker_with_another_model_is_turned_away() -> None:
    rig = running_rig()
    rig.worker.model = replace(rig.worker.model, name="other", weights_digest="9" * 64)
    rig.worker.restart()
    with pytest.raises(ModelMismatch, match=r"other.*fake"):
        rig.scheduler.attach_worker(WORKER, rig.worker.attach(rig.epoch, 9), rig.now_us)
    rig.check()
    assert rig.scheduler.load().num_running == 2


def test_what_a_smaller_pool_after_a_restart_cannot_hold_waits_and_ends_with_an_error() -> None:
    rig = rig_of(budget=64, capacity_wait_ms=5000)
    rig.submit(1, numbers(10), max_tokens=20)
    rig.submit(2, numbers(5, 30), max_tokens=4)
    rig.submit(3, numbers(9, 40), max_tokens=20)
    rig.step()
    rig.worker.geometry = KVGeometry(2, 4, 8, "fake/int64")
    rig.worker.restart()
    rig.submit(4, numbers(9, 50), max_tokens=20)
    rig.attach()
    assert rig.scheduler.request_len_max == 9
    while rig.step():
        pass
    rig.assert_as_alone(2)
    for _ in range(2):
        assert [rig.sequence(number).finish for number in (1, 3, 4)] == [None] * 3
        assert rig.scheduler.end_unheld(rig.now_us) == Shortage(8, 2)
        rig.now_us += 5_000_000
    rig.check()
    for number, num_blocks in ((1, 8), (3, 7), (4, 7)):
        finish = rig.sequence(number).finish
        assert finish is not None and finish.reason is FinishReason.ERROR and finish.output_len == (number != 4)
        assert f"a KV pool of {num_blocks} blocks" in finish.message and "has 2," in finish.message
    rig.finish_all()


def test_attempts_grow_at_every_entry() -> None:
    """Case 35 and 90: a preemption itself changes no attempt."""
    rig = running_rig()
    assert rig.sequence(1).attempt == 1
    rig.scheduler.lose_worker(WORKER, LEFT, rig.now_us)
    assert rig.sequence(1).attempt == 1
    rig.worker.restart()
    rig.attach()
    rig.step()
    assert rig.sequence(1).attempt == 2


def test_a_slot_of_an_earlier_attempt_is_not_gone_back_to() -> None:
    rig = running_rig()
    expected, _ = reference_output(rig.sequence(1).submission, rig.pool_tokens)
    rig.scheduler.claim((1).to_bytes(16, "big"), 0, tuple(expected[:6]), rig.now_us)
    rig.attach()  # nothing has left yet: back into the slot
    assert (rig.sequence(1).status, rig.sequence(1).attempt) == (SequenceStatus.RUNNING, 1)
    batch = rig.schedule()  # it enters its slot again, with the tokens claimed
    assert batch is not None and [entry.attempt for entry in batch.entries] == [2]
    rig.attach()  # but that batch is discarded
    assert (rig.sequence(1).status, rig.sequence(1).attempt) == (SequenceStatus.WAITING, 2)
    rig.finish_all(in_flight=2)
    rig.assert_as_alone(1)
    assert rig.sequence(1).attempt == 3


def test_a_slot_with_other_tokens_is_not_gone_on_in() -> None:
    rig = running_rig()
    rig.scheduler.claim((1).to_bytes(16, "big"), 0, (11, 12), rig.now_us)
    rig.attach()
    assert rig.sequence(1).status is SequenceStatus.WAITING
    rig.finish_all(in_flight=2)
    assert rig.output(1)[:2] == [11, 12]
    rig.assert_as_alone(2)


def test_victims_are_chosen_in_order_of_admission_after_an_attach_too() -> None:
    """The younger request sits in the lower slot, which the report names first."""
    rig = rig_of(budget=64)
    rig.submit(1, numbers(5), max_tokens=8)
    rig.submit(2, numbers(5, 30), max_tokens=8)
    rig.step()
    rig.scheduler.abort((1).to_bytes(16, "big"), rig.now_us)
    rig.submit(3, numbers(5, 50), max_tokens=8)
    rig.step()
    assert (rig.sequence(2).slot, rig.sequence(3).slot) == (1, 0)
    rig.attach()
    replica = rig.scheduler.replica(WORKER)
    assert replica is not None and [request_id[-1] for request_id in replica.running] == [2, 3]


def test_what_is_durable_stays_so_over_an_attach() -> None:
    rig = running_rig()
    replica = rig.scheduler.replica(WORKER)
    assert replica is not None
    rig.scheduler.set_durable_step(WORKER, replica.boot_id, 2)
    applied = replica.applied_step
    rig.attach()
    batch, after = rig.schedule(), rig.scheduler.replica(WORKER)
    assert batch is not None and batch.durable_step == 2
    assert after is not None and after is not replica and after.applied_step == applied
    rig.worker.restart()
    rig.attach()
    batch = rig.schedule()
    assert batch is not None and batch.durable_step == 0


def test_a_request_that_runs_is_not_taken_over_by_another_worker() -> None:
    """The other worker still has a slot of it from before: that one is dropped, and its full blocks can be hit."""
    rig, other = running_rig(), running_rig().worker
    report = other.attach(Epoch(rig.epoch.number, b"leader"), 9)
    rig.scheduler.attach_worker("worker:2", report, rig.now_us)
    rig.check()
    assert rig.sequence(1).worker == rig.sequence(2).worker == WORKER
    batch = rig.scheduler.schedule("worker:2", rig.now_us)
    assert batch is not None and batch.num_rows == 0
    assert sorted(drop.request_id[-1] for drop in batch.drops) == [1, 2]
    replica = rig.scheduler.replica("worker:2")
    assert replica is not None and replica.manager.num_free_blocks == 20 and replica.manager.published()


def test_entries_that_a_report_contradicts_are_taken_back() -> None:
    """Somebody else has written a cached block since: the journal is told, and nobody hits it."""
    rig = rig_of()
    rig.submit(1, numbers(9), max_tokens=1)
    rig.finish_all()
    rig.worker.dropped.clear()
    first, second = (entry.block_id for entry in next(iter(rig.state.blocks.values())).values())
    rig.worker.last_write_step[second] = rig.worker.last_step = 50
    rig.attach()
    assert [list(entries) for entries in rig.state.blocks.values()] == [[first]]
    batch = rig.schedule()
    assert batch is None
    rig.submit(2, numbers(9), max_tokens=1)
    batch = rig.schedule()
    assert batch is not None and batch.step_id == 51 and batch.entries[0].num_cached_tokens == 4
