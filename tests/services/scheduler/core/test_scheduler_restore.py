"""A new leader starts from a join: slots go on, orphans wait for their requests, gateways' tokens are kept."""

from dataclasses import replace

import pytest
from fake_worker import FakeWorker, reference_output
from scheduler_rig import WORKER, Rig, own_stop, submission

from services.scheduler.core.admission import Admitted, Known, Unknown
from services.scheduler.core.record import Arrival, StoredState
from services.scheduler.core.recovered import Recovered, RecoveredRequest
from services.scheduler.core.recovery import GatewayClaim, join
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.sequence_status import SequenceStatus
from services.scheduler.core.worker_loss import LEFT
from tessera.values.config import Config
from tessera.values.finish import Finish, FinishReason
from tessera.values.identity import Epoch

ID = (1).to_bytes(16, "big")


def numbers(count: int, first: int = 10) -> list[int]:
    return list(range(first, first + count))


def running_rig(num_steps: int = 4) -> Rig:
    rig = Rig(Config(max_num_seqs=4, max_num_batched_tokens=8), FakeWorker(20, 4))
    rig.submit(1, numbers(5), max_tokens=8)
    rig.submit(2, numbers(18, 30), max_tokens=8)
    for _ in range(num_steps):
        rig.step(in_flight=2)
    return rig


def take_over(rig: Rig, stored: StoredState, claims: list[GatewayClaim] | None = None) -> None:
    """The next leader attaches to the worker and joins what is said."""
    rig.epoch = Epoch(rig.epoch.number + 1, b"leader")
    rig.nonce = 1
    report = rig.worker.attach(rig.epoch, 1)
    recovered = join(stored, {WORKER: report}, claims or [], own_stop)
    rig.scheduler = Scheduler(rig.config, rig.epoch)
    rig.scheduler.restore(recovered, {WORKER: report}, rig.now_us)
    rig.state = StoredState()
    rig.check()


@pytest.mark.parametrize("executed", [0, 1, 2])
def test_a_takeover_recomputes_nothing(executed: int) -> None:
    rig = running_rig()
    while rig.schedule() is not None:
        pass
    for _ in range(executed):
        rig.execute()
    rig.take()
    last_step = rig.worker.last_step
    take_over(rig, rig.state)
    assert rig.scheduler.load().num_running == 2
    rig.finish_all(in_flight=2)
    rig.assert_as_alone(1)
    rig.assert_as_alone(2)
    assert rig.worker.computed_positions == (5 + 7) + (18 + 7)
    assert rig.scheduler.load().recomputed_positions == 0
    first = next(batch for batch in rig.batches if batch.epoch == rig.epoch)
    assert first.step_id == last_step + 1, "step ids run on across epochs"


def test_finished_requests_can_still_be_read_and_waiting_ones_keep_their_place() -> None:
    rig = Rig(Config(max_num_seqs=1, max_num_batched_tokens=8), FakeWorker(20, 4))
    for number in (1, 2, 3):
        rig.submit(number, numbers(4, 10 * number), max_tokens=2)
    rig.step()
    rig.step()
    rig.step()
    before = rig.sequence(1)
    take_over(rig, rig.state)
    after = rig.sequence(1)
    assert (after.output_token_ids(), after.finish, after.timings) == (before.output_token_ids(), before.finish, before.timings)
    rig.submit(4, numbers(4, 50), max_tokens=2)
    rig.finish_all()
    entered = [entry.request_id[-1] for batch in rig.batches for entry in batch.entries]
    assert entered == [1, 2, 3, 4]
    assert rig.sequence(4).arrival == Arrival(2, 1) > rig.sequence(3).arrival
    assert rig.sequence(3).timings.total_us >= rig.sequence(3).timings.ttft_us > 0


def test_tokens_that_only_a_gateway_had_are_kept() -> None:
    """The slot is behind: it enters again with all ids, its KV kept."""
    rig = running_rig()
    expected, _ = reference_output(rig.sequence(1).submission, rig.pool_tokens)
    seen = tuple(expected[: len(rig.output(1)) + 2])
    take_over(rig, rig.state, [GatewayClaim(ID, 3, seen)])
    sequence = rig.sequence(1)
    assert sequence.output_token_ids() == seen and sequence.subscriber == 3
    computed = sequence.ledger.computed_len
    batch = rig.schedule()
    assert batch is not None
    entry = next(entry for entry in batch.entries if entry.request_id == ID)
    assert (entry.attempt, entry.num_cached_tokens) == (2, computed)
    assert [drop.request_id for drop in batch.drops] == [ID]
    rig.finish_all(in_flight=2)
    rig.assert_as_alone(1)
    assert rig.scheduler.load().recomputed_positions == 0


def test_a_gateways_last_token_replaces_the_slots() -> None:
    """They differ only in the token whose KV is not computed yet: the slot is entered again, and computes that one position."""
    rig = running_rig()
    output = rig.sequence(1).output_token_ids()
    seen = (*output[:-1], output[-1] ^ 1)
    held = next(slot.computed_len for slot in rig.worker.report().slots if slot.request_id == ID)
    assert held == 5 + len(output) - 1
    take_over(rig, rig.state, [GatewayClaim(ID, 0, seen)])
    assert rig.sequence(1).status is SequenceStatus.RUNNING
    batch = rig.schedule()
    assert batch is not None
    entry = next(entry for entry in batch.entries if entry.request_id == ID)
    assert entry.num_cached_tokens == held and entry.token_ids[5:].tolist() == list(seen)
    rig.finish_all()
    assert rig.output(1)[: len(seen)] == list(seen) and len(rig.output(1)) == 8


def test_steps_are_numbered_as_the_join_says() -> None:
    rig = running_rig()
    rig.epoch, rig.nonce = Epoch(2, b"leader"), 1
    report = rig.worker.attach(rig.epoch, 1)
    recovered = join(rig.state, {WORKER: report}, [], own_stop)
    worker = replace(recovered.workers[0], next_step=50)
    rig.scheduler, rig.state = Scheduler(rig.config, rig.epoch), StoredState()
    rig.scheduler.restore(replace(recovered, workers=(worker,)), {WORKER: report}, rig.now_us)
    batch = rig.schedule()
    assert batch is not None and batch.step_id == 50


def test_a_contradicted_slot_is_dropped_and_what_is_computed_again_is_counted_once() -> None:
    """Only a store that is not deterministic can say so. The first KV that differs is that of the first output token."""
    rig = running_rig()
    wrong = (11, 11, 11)
    take_over(rig, rig.state, [GatewayClaim(ID, 0, wrong)])
    assert rig.sequence(1).status is SequenceStatus.WAITING and rig.sequence(1).attempt == 1
    rig.finish_all(in_flight=2)
    assert rig.output(1)[:3] == list(wrong) and len(rig.output(1)) == 8
    rig.assert_as_alone(2)
    assert not rig.worker.slots and rig.free_blocks == 20


def stranded(rig: Rig) -> None:
    """Restore from a join that leaves a slot unused though it agrees."""
    rig.epoch, rig.nonce = Epoch(2, b"leader"), 1
    report = rig.worker.attach(rig.epoch, 1)
    recovered = join(rig.state, {WORKER: report}, [], own_stop)
    requests = tuple(replace(item, adoption=None) for item in recovered.requests)
    rig.scheduler, rig.state = Scheduler(rig.config, rig.epoch), StoredState()
    rig.scheduler.restore(replace(recovered, requests=requests), {WORKER: report}, rig.now_us)
    rig.check()


def test_positions_that_a_takeover_threw_away_are_counted() -> None:
    """6 positions are held: the first block comes back as a hit, the 2 positions of the partial one are computed again."""
    rig = Rig(worker=FakeWorker(20, 4))
    rig.submit(1, numbers(5), max_tokens=8)
    rig.step()
    rig.step()
    stranded(rig)
    assert rig.scheduler.load().recomputed_positions == 0
    rig.schedule()
    assert rig.scheduler.load().recomputed_positions == 6 - 4
    rig.worker.restart()
    rig.attach()
    rig.schedule()
    assert rig.scheduler.load().recomputed_positions == 6 - 4, "what is computed again later has other reasons"


def test_on_another_worker_all_of_them_are_computed_again() -> None:
    """The one that held them is lost before the request is admitted."""
    rig = Rig(worker=FakeWorker(20, 4))
    rig.submit(1, numbers(5), max_tokens=8)
    rig.step()
    rig.step()
    stranded(rig)
    rig.scheduler.attach_worker("worker:2", FakeWorker(20, 4).attach(rig.epoch, 1), rig.now_us)
    rig.scheduler.lose_worker(WORKER, LEFT, rig.now_us)
    assert rig.scheduler.schedule("worker:2", rig.now_us) is not None
    assert rig.scheduler.load().recomputed_positions == 6


def orphaned_rig() -> tuple[Rig, tuple[int, ...]]:
    """The store knows nothing of request 1, whose slot is live; its gateway holds the tokens returned."""
    rig = running_rig()
    output = rig.sequence(1).output_token_ids()
    stored = StoredState(0, {key: value for key, value in rig.state.requests.items() if key != ID}, rig.state.blocks)
    take_over(rig, stored)
    assert rig.scheduler.request(ID) is None and rig.scheduler.load().num_running == 1
    return rig, output


def test_an_orphan_goes_on_when_its_request_comes() -> None:
    rig, output = orphaned_rig()
    computed = rig.worker.computed_positions
    request = submission(1, numbers(5), replace(rig.sequence(2).submission.sampling, max_tokens=8))
    assert rig.scheduler.submit(request, 1, output[:2], rig.now_us) == Admitted(ID)
    rig.check()
    assert rig.sequence(1).status is SequenceStatus.RUNNING and rig.sequence(1).output_token_ids() == output
    rig.scheduler.expire_orphans()
    rig.finish_all(in_flight=2)
    rig.assert_as_alone(1)
    rig.assert_as_alone(2)
    held_by_2 = 18 + 7
    assert rig.worker.computed_positions == 5 + 7 + held_by_2 > computed


def test_an_orphan_that_stops_at_once_ends() -> None:
    rig, output = orphaned_rig()
    request = submission(1, numbers(5), replace(rig.sequence(2).submission.sampling, max_tokens=2))
    rig.scheduler.submit(request, 1, (), rig.now_us)
    rig.check()
    assert rig.reason(1) is FinishReason.MAX_TOKENS and rig.sequence(1).output_token_ids() == output[:2]
    rig.finish_all(in_flight=2)
    assert rig.free_blocks == 20 and not rig.worker.slots


def test_an_orphan_with_other_tokens_is_given_up() -> None:
    rig, _ = orphaned_rig()
    request = submission(1, numbers(5), replace(rig.sequence(2).submission.sampling, max_tokens=8))
    rig.scheduler.submit(request, 1, (11, 11, 11), rig.now_us)
    rig.check()
    assert rig.sequence(1).status is SequenceStatus.WAITING
    assert rig.scheduler.load().num_contradictions == 1
    rig.finish_all(in_flight=2)
    assert rig.output(1)[:3] == [11, 11, 11] and rig.sequence(1).attempt == 2, "its slot had entered at 1"
    assert rig.free_blocks == 20 and not rig.worker.slots


def test_orphans_hold_their_blocks_until_they_expire() -> None:
    rig, _ = orphaned_rig()
    free = rig.free_blocks
    rig.attach()
    assert rig.free_blocks == free, "also over another attach"
    rig.scheduler.expire_orphans()
    rig.check()
    assert rig.free_blocks > free
    rig.finish_all(in_flight=2)
    assert rig.free_blocks == 20 and not rig.worker.slots
    rig.assert_as_alone(2)


def test_a_claim_of_a_later_subscriber_wins_and_is_told() -> None:
    rig = running_rig()
    assert rig.scheduler.claim(ID, 2, (), rig.now_us) == Known(ID, 2)
    rig.check()
    assert rig.state.requests[ID].subscriber == 2
    assert rig.scheduler.claim(ID, 1, (11,), rig.now_us) == Known(ID, 2)
    assert rig.sequence(1).status is SequenceStatus.RUNNING, "a lower number changes nothing"
    assert rig.scheduler.claim(b"nobody", 1, (), rig.now_us) == Unknown(b"nobody")
    assert rig.try_submit(1, numbers(5), max_tokens=8) == Known(ID, 2)


def test_a_claim_with_fewer_tokens_changes_nothing() -> None:
    rig = running_rig()
    output = rig.sequence(1).output_token_ids()
    rig.scheduler.claim(ID, 0, output[:1], rig.now_us)
    rig.scheduler.claim(ID, 0, output, rig.now_us)
    assert rig.sequence(1).status is SequenceStatus.RUNNING
    assert rig.scheduler.take_changes() is None


def test_tokens_that_a_late_gateway_holds_replace_the_committed_ones() -> None:
    rig = running_rig()
    rig.schedule()
    rig.scheduler.claim(ID, 0, (11, 12), rig.now_us)
    rig.check()
    assert rig.sequence(1).output_token_ids() == (11, 12) and rig.sequence(1).status is SequenceStatus.WAITING
    rig.finish_all(in_flight=2)
    assert rig.output(1)[:2] == [11, 12] and len(rig.output(1)) == 8
    rig.assert_as_alone(2)
    assert rig.free_blocks == 20


def test_a_finished_request_keeps_its_end_whatever_a_gateway_says() -> None:
    rig = running_rig()
    rig.finish_all(in_flight=2)
    rig.scheduler.claim(ID, 1, (11, 12), rig.now_us)
    rig.check()
    rig.assert_as_alone(1)


def test_the_stop_rules_run_over_what_a_resume_brings() -> None:
    rig = Rig(worker=FakeWorker(20, 4))
    request = submission(1, numbers(5), replace(submission(1, [10]).sampling, max_tokens=3))
    expected, finish = reference_output(request, rig.pool_tokens)
    assert rig.scheduler.submit(request, 1, tuple(expected), rig.now_us) == Admitted(ID)
    rig.check()
    assert rig.sequence(1).finish == finish and rig.schedule() is None


def test_a_leader_can_start_before_any_worker_and_keeps_what_it_was_told() -> None:
    """Nobody has told the model yet: requests wait, can be aborted and ended by gateways, and get their rules at the attach."""
    rig = running_rig()
    outputs = {number: rig.output(number) for number in (1, 2)}
    waiting = tuple(
        RecoveredRequest(sequence.submission, sequence.arrival, 0, sequence.attempt, sequence.output_token_ids(), None, None)
        for sequence in rig.scheduler.requests()
    )
    rig.epoch = Epoch(2, b"leader")
    rig.scheduler, rig.state, rig.nonce = Scheduler(rig.config, rig.epoch), StoredState(), 0
    rig.scheduler.restore(Recovered(0, waiting, (), (), ()), {}, rig.now_us)
    rig.check()
    assert rig.scheduler.schedule(WORKER, rig.now_us) is None and rig.scheduler.request_len_max is None
    rig.scheduler.abort((2).to_bytes(16, "big"), rig.now_us)
    rig.check()
    rig.attach()
    assert rig.sequence(1).status is SequenceStatus.RUNNING, "its slot was still there"
    rig.finish_all(in_flight=2)
    assert rig.output(1)[: len(outputs[1])] == outputs[1]
    rig.assert_as_alone(1)
    assert rig.sequence(2).finish == Finish(FinishReason.ABORTED, len(outputs[2]))
    assert not rig.worker.slots and rig.free_blocks == 20


def test_blocks_of_replaced_tokens_are_published_under_their_own_digests() -> None:
    rig = Rig(worker=FakeWorker(20, 4))
    rig.submit(1, numbers(5), max_tokens=12)
    for _ in range(9):
        rig.step()
    assert rig.sequence(1).table.num_published == 3
    rig.scheduler.claim(ID, 0, (11, 12), rig.now_us)
    rig.finish_all()
    rig.submit(2, numbers(5) + rig.output(1), max_tokens=1)
    rig.finish_all()
    assert rig.sequence(2).num_cached_tokens == 16
    rig.assert_as_alone(2)
