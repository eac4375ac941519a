"""Preemption by swap: the KV goes to host memory and comes back, and nobody can tell by the tokens."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fake_worker import LIMITS, FakeWorker
from fleet_rig import FleetRig
from scheduler_rig import WORKER, Rig, batch_short_of_a_block

from services.scheduler.core.preemption import Preemption
from services.scheduler.core.replica import Replica
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.sequence_status import SequenceStatus
from services.scheduler.core.worker_loss import LEFT
from tessera.values.config import Config
from tessera.values.finish import FinishReason


def numbers(count: int, first: int = 10) -> list[int]:
    return list(range(first, first + count))


def rig_of(num_blocks: int, num_host_blocks: int = 16, budget: int = 64, **config: object) -> Rig:
    fields = {"max_num_seqs": 8, "max_num_batched_tokens": budget, "preemption_mode": "swap", **config}
    return Rig(Config(**fields), FakeWorker(num_blocks, 4, num_host_blocks=num_host_blocks))


def replica_of(rig: Rig) -> Replica:
    replica = rig.scheduler.replica(WORKER)
    assert replica is not None
    return replica


def submit_two(rig: Rig, max_tokens: int = 8) -> None:
    """Two prompts of 7 tokens; with 8 more each they want all of four blocks of 4."""
    rig.submit(1, numbers(7), max_tokens=max_tokens)
    rig.submit(2, numbers(7, 30), max_tokens=max_tokens)


def two_in_a_pool_for_one(rig: Rig, in_flight: int = 1) -> None:
    """Both run until the first needs the block that only the second can give: that is swapped out, in a batch that was issued."""
    submit_two(rig)
    for _ in range(30):
        if rig.sequence(2).status is SequenceStatus.SWAPPED:
            return
        rig.step(in_flight)
    raise AssertionError("nobody was swapped out")


def issue_until(rig: Rig, is_issued: Callable[[], bool]) -> None:
    """Batches are issued until one does what is waited for; that one is not started, those before it have ended."""
    while not is_issued():
        if rig.worker.queue:
            rig.post(rig.execute())
        rig.schedule()


def finish_two_computing_nothing_again(rig: Rig, in_flight: int = 1) -> None:
    """The two of `submit_two` end as if each had been alone, every position computed once."""
    rig.finish_all(in_flight)
    rig.assert_as_alone(1, 2)
    assert rig.worker.computed_positions == 2 * (7 + 8 - 1)


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("caching", [False, True])
def test_what_is_swapped_out_comes_back_and_computes_nothing_again(in_flight: int, caching: bool) -> None:
    rig = rig_of(4, enable_prefix_caching=caching)
    two_in_a_pool_for_one(rig, in_flight)
    sequence = rig.sequence(2)
    assert sequence.attempt == 1 and sequence.slot is not None and not sequence.table.block_ids
    finish_two_computing_nothing_again(rig, in_flight)
    moved = [swap.request_id[-1] for batch in rig.batches for swap in batch.swap_outs]
    assert moved == [2], "the later one, once"
    assert sum(len(batch.swap_ins) for batch in rig.batches) == 1
    assert sum(len(batch.entries) for batch in rig.batches) == 2, "nobody entered a slot again"
    load = rig.scheduler.load()
    assert (load.num_preemptions, load.num_swap_outs, load.num_swapped, load.num_free_blocks) == (1, 1, 0, 4)
    assert rig.sequence(2).timings.num_preemptions == 1


def test_outputs_in_flight_of_a_swapped_sequence_still_count() -> None:
    rig = rig_of(4)
    (swap,) = batch_short_of_a_block(rig, 5, 5).swap_outs
    assert swap.request_id[-1] == 2
    assert len(swap.pairs) == 2, "what is in flight moves as well"
    rig.post(rig.execute())
    assert (len(rig.output(1)), len(rig.output(2))) == (2, 2)
    assert rig.sequence(2).status is SequenceStatus.SWAPPED
    rig.finish_all(in_flight=2)
    rig.assert_as_alone(1, 2)
    assert rig.worker.computed_positions == 2 * (7 + 5 - 1)


def test_a_stop_in_an_output_in_flight_ends_a_swapped_sequence() -> None:
    rig = rig_of(4)
    batch_short_of_a_block(rig, 5, 2)
    assert rig.sequence(2).status is SequenceStatus.SWAPPED
    rig.post(rig.execute())
    assert rig.reason(2) is FinishReason.MAX_TOKENS
    rig.finish_all(in_flight=2)
    rig.assert_as_alone(1, 2)
    assert replica_of(rig).manager.num_free_host_blocks == 16


@pytest.mark.parametrize("how", ["abort", "stop string", "other tokens"])
def test_a_swapped_sequence_that_is_ended_or_restarted_frees_its_host_blocks(how: str) -> None:
    rig = rig_of(4)
    two_in_a_pool_for_one(rig)
    request_id = rig.sequence(2).request_id
    if how == "abort":
        rig.scheduler.abort(request_id, rig.now_us)
        assert rig.reason(2) is FinishReason.ABORTED
    elif how == "stop string":
        rig.scheduler.stop_found(request_id, 1, "stop", rig.now_us)
        assert rig.reason(2) is FinishReason.STOP_STRING
    else:
        rig.scheduler.claim(request_id, 1, (*rig.output(2), 5, 6), rig.now_us)
        assert rig.sequence(2).status is SequenceStatus.WAITING
    rig.check()
    assert replica_of(rig).manager.num_free_host_blocks == 16
    rig.finish_all()
    assert not rig.worker.slots and rig.free_blocks == 4
    rig.assert_as_alone(1)


def test_without_room_in_host_memory_it_is_computed_again() -> None:
    for num_host_blocks in (0, 1):
        rig = rig_of(4, num_host_blocks)
        submit_two(rig)
        rig.finish_all(in_flight=2)
        assert rig.scheduler.load().num_preemptions == 1 and rig.scheduler.load().num_swap_outs == 0
        assert not any(batch.swap_outs for batch in rig.batches)
        rig.assert_as_alone(1, 2)


def test_cached_blocks_are_not_copied_back() -> None:
    """The first block of both is the same: the first request keeps it in the pool while the second is out."""
    rig = rig_of(6)
    rig.submit(1, numbers(4) + numbers(7, 20), max_tokens=8)
    rig.step()
    rig.submit(2, numbers(4) + numbers(7, 30), max_tokens=8)
    rig.finish_all()
    (out,) = [swap for batch in rig.batches for swap in batch.swap_outs]
    (back,) = [swap for batch in rig.batches for swap in batch.swap_ins]
    assert len(out.pairs) == len(out.block_table)
    assert 0 < len(back.pairs) < len(out.pairs)
    rig.assert_as_alone(1, 2)
    assert replica_of(rig).manager.stats.resume_cached_tokens > 0


def test_swapped_ones_come_back_before_anybody_new() -> None:
    rig = rig_of(4)
    two_in_a_pool_for_one(rig)
    rig.submit(3, [40], max_tokens=1)
    while rig.sequence(2).status is SequenceStatus.SWAPPED:
        assert rig.sequence(3).status is SequenceStatus.WAITING
        rig.step()
    rig.finish_all()
    rig.assert_as_alone(1, 2, 3)


def test_a_sequence_swapped_out_in_the_middle_of_its_prompt_goes_on_there() -> None:
    rig = rig_of(6, budget=6, max_num_seqs=2, enable_prefix_caching=False)
    rig.submit(1, numbers(7), max_tokens=12)
    rig.step()
    rig.submit(2, numbers(16, 30), max_tokens=1)
    while rig.sequence(2).status is not SequenceStatus.SWAPPED:
        assert rig.step()
    assert 0 < rig.sequence(2).ledger.computed_len < 15
    rig.finish_all()
    rig.assert_as_alone(1, 2)
    assert rig.worker.computed_positions == 7 + 12 - 1 + 16


def test_a_lost_workers_swapped_ones_wait_and_are_found_again() -> None:
    """Lost for good they are computed anew; found again by an attach of the same boot they are swapped as before."""
    rig = rig_of(4)
    two_in_a_pool_for_one(rig)
    rig.scheduler.lose_worker(WORKER, LEFT, rig.now_us)
    rig.check()
    assert rig.sequence(2).status is SequenceStatus.WAITING
    while rig.worker.queue:
        rig.execute()
    rig.attach()
    assert rig.sequence(2).status is SequenceStatus.SWAPPED
    finish_two_computing_nothing_again(rig)


@pytest.mark.parametrize("num_requests", [1, 2])
@pytest.mark.parametrize("turns", range(1, 9))
def test_what_outgrows_its_pool_goes_on_at_the_larger_worker_that_has_come(num_requests: int, turns: int) -> None:
    """The larger pool allows more tokens than the small one holds: on the host they would wait for ever, whether they were there before
    or run out of blocks later."""
    rig = FleetRig(1, num_blocks=4, num_host_blocks=8, preemption_mode="swap")
    for number in range(1, num_requests + 1):
        rig.submit(number, numbers(7, 30 * number), max_tokens=30)
    for _ in range(turns):
        rig.turn()
    rig.join("larger", num_blocks=20)
    rig.finish_all()
    for number in range(1, num_requests + 1):
        rig.assert_as_alone(number)


def test_what_is_on_the_host_of_a_worker_that_is_too_small_now_waits_for_another() -> None:
    rig = FleetRig(1, num_blocks=4, num_host_blocks=8, preemption_mode="swap")
    for number in (1, 2):
        rig.submit(number, numbers(7, 30 * number), max_tokens=30)
    while rig.sequence(2).status is not SequenceStatus.SWAPPED:
        rig.turn()
    rig.join("as.small", num_blocks=4)
    assert rig.sequence(2).status is SequenceStatus.SWAPPED
    rig.join("larger", num_blocks=20)
    assert rig.sequence(2).status is SequenceStatus.WAITING
    rig.turn()
    assert rig.sequence(2).worker == "larger"


def test_a_swap_that_the_worker_never_started_did_not_happen() -> None:
    """The stream broke before the batch that swaps out, or back in, was started: the report says where the KV is."""
    rig = rig_of(4)
    submit_two(rig)
    issue_until(rig, lambda: rig.sequence(2).status is SequenceStatus.SWAPPED)
    rig.attach()
    assert rig.sequence(2).status is SequenceStatus.RUNNING
    issue_until(rig, lambda: any(batch.swap_ins for batch in rig.batches))
    rig.attach()
    assert rig.sequence(2).status is SequenceStatus.SWAPPED
    finish_two_computing_nothing_again(rig)


def test_nobody_comes_back_in_the_step_in_which_he_leaves() -> None:
    """Two of the same tokens, computed beside each other: what the second gives up the first holds as well, so there is room at once."""
    rig = rig_of(6)
    rig.submit(1, numbers(8), max_tokens=8)
    rig.submit(2, numbers(8), max_tokens=8)
    while not any(batch.swap_outs for batch in rig.batches):
        assert rig.step()
    assert not rig.batches[-1].swap_ins and rig.sequence(2).status is SequenceStatus.SWAPPED
    rig.step()
    assert len(rig.batches[-1].swap_ins) == 1 and len(rig.batches[-1].swap_ins[0].pairs) == 0
    rig.finish_all()
    rig.assert_as_alone(1, 2)


@pytest.mark.parametrize("num_right", [0, 1, 3])
@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_drafts_in_flight_that_are_rejected_leave_no_trace_of_the_swap(block_size: int, num_right: int) -> None:
    """More host blocks were taken than turn out to hold anything: only those come back that the tokens need."""
    limits = replace(LIMITS, num_speculative_tokens=3)
    config = Config(max_num_seqs=4, max_num_batched_tokens=32, num_speculative_tokens=3, preemption_mode="swap")
    rig = Rig(config, FakeWorker(24 // block_size, block_size, limits, num_host_blocks=32))
    rig.worker.propose = lambda room: (room, min(room, num_right))
    submit_two(rig, max_tokens=16)
    rig.finish_all(in_flight=2)
    assert rig.scheduler.load().num_swap_outs > 0
    assert any(batch.swap_ins for batch in rig.batches)
    rig.assert_as_alone(1, 2)
    assert replica_of(rig).manager.num_free_host_blocks == 32


def test_the_journal_tells_of_a_swapped_sequence_without_a_table() -> None:
    rig = rig_of(4)
    two_in_a_pool_for_one(rig)
    stored = rig.state.requests[rig.sequence(2).request_id]
    assert (stored.status, stored.worker, list(stored.block_ids)) == (SequenceStatus.SWAPPED, WORKER, [])
    assert stored.timings.num_preemptions == 1
    rig.finish_all()


def test_many_requests_in_a_small_pool_with_a_small_host_pool_all_end() -> None:
    for policy in ("fcfs", "priority", "shortest_remaining", "recompute"):
        rig = rig_of(7, num_host_blocks=5, budget=16, preemption_policy=policy, queue_order="priority")
        for number in range(1, 9):
            rig.submit(number, numbers(3 + number % 4, 10 + number), max_tokens=12, priority=number % 3)
        rig.finish_all(in_flight=2, steps_max=200)
        rig.assert_as_alone(*range(1, 9))
        assert rig.free_blocks == 7 and replica_of(rig).manager.num_free_host_blocks == 5
        assert rig.scheduler.load().num_swap_outs > 0


def test_a_planted_wrong_pair_is_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker copies one block to another place than the table says: its next read shows it."""
    real = Replica.swap_in

    def crossed(self: Replica, *given: Any) -> object:
        result = real(self, *given)
        swap = self.swap_ins[-1]
        if len(swap.pairs) > 1:
            swap.pairs[:, 0] = np.roll(swap.pairs[:, 0], 1)
        return result

    monkeypatch.setattr(Replica, "swap_in", crossed)
    rig = rig_of(4, enable_prefix_caching=False)
    two_in_a_pool_for_one(rig)
    with pytest.raises(AssertionError, match=r"pair|not its own"):
        rig.finish_all()


def test_a_planted_swap_that_leaves_out_what_is_in_flight_is_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Replica.swap_out

    def short(self: Replica, sequence: Sequence) -> object:
        ledger = sequence.ledger
        ledger.leave_lane()
        flying, ledger._positions_in_flight = ledger._positions_in_flight, 0
        result = real(self, sequence)
        ledger._positions_in_flight = flying
        return result

    monkeypatch.setattr(Replica, "swap_out", short)
    with pytest.raises(AssertionError, match="too short"):
        test_many_requests_in_a_small_pool_with_a_small_host_pool_all_end()


def test_a_planted_leak_of_host_blocks_is_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(self: Preemption, replica: Replica) -> None:
        for sequence in replica.swapped.values():
            sequence.table.host_block_ids = sequence.table.host_block_ids[:-1]

    monkeypatch.setattr(Preemption, "next_swap_in", forgetful)
    rig = rig_of(4)
    with pytest.raises(AssertionError, match="host blocks"):
        two_in_a_pool_for_one(rig)
        rig.finish_all()
