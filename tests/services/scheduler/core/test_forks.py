"""Requests that share a prompt (n > 1): they wait for it to be computed once, fork from it, and give what they would give alone."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from fake_worker import FakeWorker
from fleet_rig import FleetRig
from scheduler_rig import WORKER, Rig, submission

from services.scheduler.core.sequence_status import SequenceStatus
from services.scheduler.core.worker_loss import LEFT
from tessera.values.batch import ScheduledBatch
from tessera.values.config import Config
from tessera.values.finish import FinishReason
from tessera.values.model import WorkerLimits

PARENT = (1).to_bytes(16, "big")


def numbers(count: int, first: int = 10) -> list[int]:
    return [10 + (first + index) % 50 for index in range(count)]


def rig_of(num_blocks: int = 60, block_size: int = 4, budget: int = 64, **config: object) -> Rig:
    limits = WorkerLimits(max_num_seqs=8, max_num_batched_tokens=128)
    return Rig(
        Config(**{"max_num_seqs": 8, "max_num_batched_tokens": budget, **config}), FakeWorker(num_blocks, block_size, limits)
    )


def submit_family(rig: Rig, prompt: list[int], num_children: int = 2, max_tokens: int = 6) -> list[int]:
    """A parent, number 1, and its children; returns their numbers."""
    rig.submit(1, prompt, max_tokens=max_tokens, seed=0, fork_of=PARENT)  # its own id
    for child in range(2, 2 + num_children):
        rig.submit(child, prompt, max_tokens=max_tokens, seed=child, fork_of=PARENT)
    return list(range(1, 2 + num_children))


def assert_as_alone(rig: Rig, family: list[int]) -> None:
    rig.assert_as_alone(*family)
    assert rig.free_blocks == rig.worker.geometry.num_blocks


def copies_of(rig: Rig) -> list[list[int]]:
    return [pair for batch in rig.batches for pair in batch.copies.tolist()]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("prompt_len", [1, 2, 4, 5, 8, 9, 17])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_prompt_is_computed_once_and_its_last_position_by_each(
    caching: bool, block_size: int, prompt_len: int, in_flight: int
) -> None:
    rig = rig_of(block_size=block_size, enable_prefix_caching=caching, max_batches_in_flight=in_flight)
    family = submit_family(rig, numbers(prompt_len), num_children=3)
    rig.finish_all(in_flight)
    assert_as_alone(rig, family)
    positions = prompt_len + 3 + sum(len(rig.output(number)) - 1 for number in family)
    assert rig.worker.computed_positions == positions
    partly_filled = (prompt_len - 1) % block_size > 0
    assert len(copies_of(rig)) == (3 if partly_filled else 0), "the block of the last position, where it holds others"


@pytest.mark.parametrize("caching", [True, False])
def test_full_blocks_are_shared_and_the_last_one_is_copied(caching: bool) -> None:
    rig = rig_of(enable_prefix_caching=caching)
    submit_family(rig, numbers(11), max_tokens=20)
    rig.step()
    rig.step()
    parent, child = rig.sequence(1), rig.sequence(2)
    assert child.table.block_ids[:2] == parent.table.block_ids[:2]
    assert not set(child.table.block_ids[2:]) & set(parent.table.block_ids[2:])
    assert rig.batches[-1].copies.tolist()[0] == [parent.table.block_ids[2], child.table.block_ids[2]]
    entry = rig.batches[-1].entries[0]
    assert (entry.num_cached_tokens, child.num_cached_tokens) == (10, 10)


def test_children_wait_for_the_prompt_and_others_pass_them() -> None:
    rig = rig_of(budget=8, max_batches_in_flight=1)
    submit_family(rig, numbers(20))
    rig.submit(9, numbers(3, 40), max_tokens=4)
    entered: list[list[int]] = []
    while rig.scheduler.load().num_waiting:
        batch = rig.schedule()
        assert batch is not None
        entered.append([entry.request_id[-1] for entry in batch.entries])
        rig.post(rig.execute())
    assert entered == [[1], [], [9], [2, 3]], "20 positions are three steps of 8, the third has room for another"
    rig.finish_all()
    assert_as_alone(rig, [1, 2, 3, 9])


def test_children_go_before_whoever_came_after_them() -> None:
    rig = rig_of(max_num_seqs=2)
    submit_family(rig, numbers(9), num_children=3, max_tokens=3)
    rig.submit(9, numbers(3, 40), max_tokens=3)
    rig.finish_all()
    assert [entry.request_id[-1] for batch in rig.batches for entry in batch.entries] == [1, 9, 2, 3, 4], (
        "who finds a free seat while they wait for the prompt takes it"
    )
    assert_as_alone(rig, [1, 2, 3, 4, 9])


def test_a_child_can_be_aborted_while_it_waits_for_the_prompt() -> None:
    rig = rig_of(long_prefill_token_threshold=8)
    submit_family(rig, numbers(20), num_children=3)
    rig.submit(9, numbers(3, 40), max_tokens=4)
    rig.step()
    assert rig.sequence(9).status is SequenceStatus.RUNNING, "it has passed them"
    for number in (2, 4):
        rig.scheduler.abort(number.to_bytes(16, "big"), rig.now_us)
        rig.check()
    assert rig.scheduler.load().num_waiting == 1
    rig.finish_all()
    assert_as_alone(rig, [1, 3, 9])


@pytest.mark.parametrize("is_sent_back", [False, True])
def test_a_child_of_a_higher_priority_waits_for_its_parents_first_turn_only(is_sent_back: bool) -> None:
    """Once the parent was sent back, nobody knows when it comes again: the child goes its own way, before it."""
    rig = rig_of(budget=8, queue_order="priority", max_batches_in_flight=1)
    rig.submit(1, numbers(14), max_tokens=6, priority=5)
    if is_sent_back:
        rig.step()
        event(rig, "sent back")
    rig.submit(2, numbers(14), max_tokens=6, priority=0, fork_of=PARENT)
    batch = rig.schedule()
    assert batch is not None and batch.entries[0].request_id[-1] == (2 if is_sent_back else 1)
    rig.post(rig.execute())
    rig.finish_all()
    assert_as_alone(rig, [2] if is_sent_back else [1, 2])


# -- the parent comes to an end, or loses its place


def event(rig: Rig, what: str) -> None:
    """Something happens to the parent."""
    if what == "aborted":
        rig.scheduler.abort(PARENT, rig.now_us)
        rig.check()
    elif what == "sent back":
        rig.scheduler.claim(PARENT, 1, (*rig.output(1), 60), rig.now_us)  # it restarts with another token
        rig.check()
    elif what == "lost":
        rig.scheduler.lose_worker(WORKER, LEFT, rig.now_us)
        rig.worker.restart()
        rig.attach()
    else:
        rig.worker.fail_next_row(PARENT)


WHAT = ["aborted", "sent back", "lost", "failed"]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("what", WHAT)
def test_children_end_as_alone_whatever_becomes_of_their_parent(what: str, steps: int, in_flight: int, caching: bool) -> None:
    """After so many steps: before its prompt is computed (two of them), before and after they have forked. In the middle of their own output."""
    rig = rig_of(budget=8, enable_prefix_caching=caching)
    submit_family(rig, numbers(14))
    for _ in range(steps):
        rig.step(in_flight)
    event(rig, what)
    rig.finish_all(in_flight)
    assert_as_alone(rig, [2, 3])
    if what == "aborted":
        assert rig.reason(1) is FinishReason.ABORTED
    elif what == "lost":
        rig.assert_as_alone(1)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_children_of_a_parent_that_has_ended_compute_the_prompt_themselves(in_flight: int) -> None:
    """Its only token comes with the end; what it has published is a hit like any other."""
    rig = rig_of()
    rig.submit(1, numbers(9), max_tokens=1)
    rig.submit(2, numbers(9), max_tokens=4, seed=3, fork_of=PARENT)
    rig.finish_all(in_flight)
    assert_as_alone(rig, [1, 2])
    assert not copies_of(rig) and rig.sequence(2).num_cached_tokens == 8


def test_a_child_of_nobody_known_is_like_any_other() -> None:
    rig = rig_of()
    rig.submit(2, numbers(9), max_tokens=4, fork_of=PARENT)
    rig.submit(3, numbers(9, 30), max_tokens=4, fork_of=(3).to_bytes(16, "big"))  # of itself
    batch = rig.schedule()
    assert batch is not None and len(batch.entries) == 2
    rig.post(rig.execute())
    rig.finish_all()
    assert_as_alone(rig, [2, 3])


def test_children_of_each_other_do_not_wait_for_ever() -> None:
    rig = rig_of()
    for number, other in ((1, 2), (2, 3), (3, 1)):
        rig.submit(number, numbers(9), max_tokens=4, fork_of=other.to_bytes(16, "big"))
    rig.finish_all()
    assert_as_alone(rig, [1, 2, 3])


def test_children_that_come_later_fork_from_a_parent_in_the_middle_of_its_output() -> None:
    rig = rig_of(enable_prefix_caching=False)
    rig.submit(1, numbers(10), max_tokens=20)
    for _ in range(8):
        rig.step(in_flight=2)
    rig.submit(2, numbers(10), max_tokens=5, seed=3, fork_of=PARENT)
    rig.finish_all(in_flight=2)
    assert len(copies_of(rig)) == 1
    assert rig.worker.computed_positions == (10 + 20 - 1) + 5, "of its prompt the child computes the last position"
    assert_as_alone(rig, [1, 2])


@pytest.mark.parametrize(
    "other",
    [
        {"prompt_token_ids": np.array([*numbers(9), 11], np.int32)},
        {"cache_salt": "another tenant"},
        {"principal": "somebody else"},
    ],
)
@pytest.mark.parametrize("caching", [True, False])
def test_nobody_forks_from_a_stranger(other: dict[str, object], caching: bool) -> None:
    """Whatever `fork_of` says: other tokens, another tenant or client."""
    rig = rig_of(enable_prefix_caching=caching)
    rig.submit(1, numbers(10), max_tokens=9)
    child = replace(submission(2, numbers(10), replace(rig.sequence(1).submission.sampling, seed=5)), fork_of=PARENT)
    rig.scheduler.submit(replace(child, **other), 0, (), rig.now_us)
    rig.check()
    batch = rig.schedule()
    may_hit = caching and "cache_salt" not in other
    assert batch is not None and len(batch.entries) == (1 if may_hit else 2), "nobody waits for what he cannot have"
    rig.post(rig.execute())
    rig.finish_all()
    assert not copies_of(rig)
    assert_as_alone(rig, [1, 2])


# -- room


@pytest.mark.parametrize("caching", [True, False])
def test_a_fork_needs_blocks_only_for_what_it_does_not_share(caching: bool) -> None:
    """B=4, N=9: the parent holds 5 blocks for 16 + 1 positions; a child needs 2 more, so two of them fit and a whole prompt would not."""
    rig = rig_of(num_blocks=9, enable_prefix_caching=caching, max_batches_in_flight=1)
    submit_family(rig, numbers(16), max_tokens=3)
    rig.step()
    rig.step()
    assert rig.scheduler.load().num_running == 3 and rig.free_blocks == 0
    rig.finish_all()
    assert_as_alone(rig, [1, 2, 3])


def test_children_that_find_no_room_to_fork_wait_like_anybody() -> None:
    rig = rig_of(num_blocks=5, enable_prefix_caching=False)
    family = submit_family(rig, numbers(15), num_children=3, max_tokens=4)
    rig.finish_all(in_flight=2, steps_max=100)
    assert_as_alone(rig, family)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("caching", [True, False])
def test_a_family_that_outgrows_the_pool_ends_all_the_same(caching: bool, mode: str) -> None:
    """Preempted parents and children fork or compute again, as it comes."""
    limits = WorkerLimits(max_num_seqs=8, max_num_batched_tokens=128)
    config = Config(max_num_seqs=8, max_num_batched_tokens=64, enable_prefix_caching=caching, preemption_mode=mode)
    rig = Rig(config, FakeWorker(10, 4, limits, num_host_blocks=12))
    family = submit_family(rig, numbers(11), num_children=4, max_tokens=20)
    rig.finish_all(in_flight=2, steps_max=400)
    assert rig.scheduler.load().num_preemptions >= 1
    assert_as_alone(rig, family)


@pytest.mark.parametrize("policy", ["mixed", "prefill_first"])
def test_forks_under_each_policy(policy: str) -> None:
    rig = rig_of(policy=policy, budget=8)
    family = submit_family(rig, numbers(21), num_children=5)
    rig.submit(9, numbers(12, 3), max_tokens=5)
    rig.finish_all(in_flight=2)
    assert_as_alone(rig, [*family, 9])
    assert len(copies_of(rig)) == 0, "21 = 5 * 4 + 1: the last position begins a block"


# -- again, and elsewhere


def test_a_fork_lost_with_its_worker_is_made_again() -> None:
    """Forking twice is forking once: the copy is in the batch of the entry, whichever that is."""
    rig = rig_of(enable_prefix_caching=False)
    family = submit_family(rig, numbers(10), max_tokens=12)
    rig.step()
    batch = rig.schedule()
    assert batch is not None and len(batch.copies) == 2
    rig.attach()  # the batch was not started: parent and worker go on, the children wait
    assert rig.sequence(1).status is SequenceStatus.RUNNING and rig.sequence(2).status is SequenceStatus.WAITING
    again = rig.schedule()
    assert again is not None and len(again.copies) == 2 and [entry.attempt for entry in again.entries] == [2, 2]
    rig.post(rig.execute())
    rig.finish_all(in_flight=2)
    assert_as_alone(rig, family)
    assert rig.worker.computed_positions == 10 + 2 + 3 * 11


def test_children_go_to_the_worker_of_their_parent() -> None:
    """Although the other one has less to do."""
    rig = FleetRig(num_workers=2, worker_choice="least_requests", enable_prefix_caching=False)
    parent = rig.submit(1, numbers(10), max_tokens=12)
    rig.turn()
    children = [rig.submit(number, numbers(10), max_tokens=12, fork_of=PARENT) for number in (2, 3)]
    rig.turn()
    rig.turn()
    assert parent.worker and [child.worker for child in children] == [parent.worker] * 2
    rig.finish_all()
    computed = sum(worker.computed_positions for worker in rig.workers.values())
    assert computed == 10 + 2 + 3 * 11
    for number in (1, 2, 3):
        rig.assert_as_alone(number)


def test_a_child_that_has_no_seat_beside_its_parent_goes_elsewhere() -> None:
    rig = FleetRig(num_workers=2, max_num_seqs=1)
    parent = rig.submit(1, numbers(10), max_tokens=12)
    rig.turn()
    child = rig.submit(2, numbers(10), max_tokens=12, fork_of=PARENT)
    rig.turn()
    rig.turn()
    assert parent.worker and child.worker and child.worker != parent.worker
    rig.finish_all()
    rig.assert_as_alone(1)
    rig.assert_as_alone(2)


# -- the worker of these tests sees what is wrong


def drop_copies(batch: ScheduledBatch) -> ScheduledBatch:
    return replace(batch, copies=batch.copies[:0])


def copy_the_block_before(batch: ScheduledBatch) -> ScheduledBatch:
    copies = batch.copies.copy()
    copies[:, 0] = batch.entries[0].block_table[0]
    return replace(batch, copies=copies)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("damage", [drop_copies, copy_the_block_before])
def test_a_copy_that_is_missing_or_of_another_block_is_seen(
    damage: Callable[[ScheduledBatch], ScheduledBatch], caching: bool
) -> None:
    rig = rig_of(enable_prefix_caching=caching)
    submit_family(rig, numbers(11))
    rig.step()
    batch = rig.schedule()
    assert batch is not None and len(batch.copies) == 2
    rig.worker.queue[-1] = damage(batch)
    with pytest.raises(AssertionError, match="is not its own"):
        rig.execute()
