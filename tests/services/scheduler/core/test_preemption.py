"""Too few blocks: who goes, who comes back, and that everybody ends."""

from dataclasses import replace

import numpy as np
from fake_worker import FakeWorker
from scheduler_rig import WORKER, Rig, batch_short_of_a_block, submission

from services.scheduler.core.record import Arrival
from services.scheduler.core.recovered import Adoption, Recovered, RecoveredRequest, RecoveredWorker
from services.scheduler.core.sequence_status import SequenceStatus
from services.scheduler.core.worker_loss import LEFT
from tessera.values.batch import ScheduledBatch
from tessera.values.config import Config
from tessera.values.finish import FinishReason
from tessera.values.report import SlotReport
from tessera.values.sampling import SamplingParams


def numbers(count: int, first: int = 10) -> list[int]:
    return list(range(first, first + count))


def rig_of(num_blocks: int, budget: int = 64, **config: object) -> Rig:
    return Rig(Config(**{"max_num_seqs": 8, "max_num_batched_tokens": budget, **config}), FakeWorker(num_blocks, 4))


def preempted(batch: ScheduledBatch) -> list[int]:
    return [drop.request_id[-1] for drop in batch.drops if drop.finish is None]


def test_a_request_that_outgrows_the_pool_ends_by_length() -> None:
    """Case 26: N=2, B=4, 7 prompt ids. All 8 positions are computed, the ninth token needs none; no neighbour decides it."""
    for in_flight in (1, 2):
        rig = rig_of(2)
        rig.submit(1, numbers(7), max_tokens=10)
        rig.finish_all(in_flight)
        assert (rig.reason(1), rig.sequence(1).ledger.num_tokens) == (FinishReason.MAX_MODEL_LEN, 9)
        assert rig.free_blocks == 2
        rig.assert_as_alone(1)


def test_a_prefill_and_a_decode_that_do_not_fit_together_both_end() -> None:
    """Case 27: N=5, B=4, budget 8."""
    for first, second in (((4, 12), (16, 1)), ((16, 1), (4, 12))):
        rig = rig_of(5, budget=8)
        rig.submit(1, numbers(first[0]), max_tokens=first[1])
        rig.step()
        rig.submit(2, numbers(second[0], 30), max_tokens=second[1])
        rig.finish_all(in_flight=2, steps_max=40)
        rig.assert_as_alone(1, 2)


def test_two_requests_and_one_block_do_not_push_each_other_out_for_ever() -> None:
    """Case 29: N=4, B=4, two requests of 7 ids, max_tokens 5."""
    for in_flight in (1, 2):
        rig = rig_of(4)
        rig.submit(1, numbers(7), max_tokens=5)
        rig.submit(2, numbers(7, 30), max_tokens=5)
        steps = rig.finish_all(in_flight, steps_max=20)
        assert steps <= 20
        assert [number for batch in rig.batches for number in preempted(batch)] == [2], "the later one, once"
        assert rig.scheduler.load().num_preemptions == 1
        assert [rig.sequence(number).timings.num_preemptions for number in (1, 2)] == [0, 1]
        rig.assert_as_alone(1, 2)


def test_a_preempted_request_keeps_its_tokens_and_comes_back_first() -> None:
    """Case 31: it is ahead of one that never started."""
    rig = rig_of(6, enable_prefix_caching=False)
    rig.submit(1, numbers(7), max_tokens=9)
    rig.submit(2, numbers(7, 30), max_tokens=9)
    rig.step()
    rig.submit(3, numbers(9, 40), max_tokens=2)
    while rig.sequence(2).status is SequenceStatus.RUNNING:
        rig.step()
    kept = rig.output(2)
    assert kept and rig.scheduler.load().num_waiting == 2
    rig.finish_all()
    assert rig.output(2)[: len(kept)] == kept
    entered = [(entry.request_id[-1], entry.attempt) for batch in rig.batches for entry in batch.entries]
    assert entered == [(1, 1), (2, 1), (2, 2), (3, 1)]
    resumed = next(entry for batch in rig.batches for entry in batch.entries if entry.attempt == 2)
    assert resumed.token_ids[7:].tolist() == kept and resumed.prompt_len == 7
    for number in (1, 2, 3):
        rig.assert_as_alone(number)


def test_a_resume_needs_a_block_to_spare_beside_others() -> None:
    """Its whole length fits the 4 free blocks, but the next block of its neighbour would send it back at once."""
    rig = rig_of(8, enable_prefix_caching=False)
    rig.submit(1, numbers(14), max_tokens=7)
    rig.submit(2, numbers(14, 30), max_tokens=7)
    rig.step()
    rig.scheduler.lose_worker(WORKER, LEFT, rig.now_us)
    rig.worker.restart()
    rig.attach()
    rig.step()
    assert rig.sequence(1).status is SequenceStatus.RUNNING
    assert rig.sequence(2).status is SequenceStatus.WAITING and rig.free_blocks == 4
    rig.finish_all()
    assert rig.scheduler.load().num_preemptions == 0
    rig.assert_as_alone(2)


def test_the_output_of_a_preempted_attempt_is_dropped() -> None:
    """Case 43: the step that was in flight samples a token for somebody who is not there; it is sampled again, the same."""
    rig = rig_of(4)
    assert preempted(batch_short_of_a_block(rig, 5, 5)) == [2]
    rig.post(rig.execute())
    assert (len(rig.output(1)), len(rig.output(2))) == (2, 1)
    rig.finish_all(in_flight=2)
    rig.assert_as_alone(1, 2)


def test_an_output_of_an_earlier_attempt_is_dropped() -> None:
    """Case 90: the sequence is back at the start when the result of its step at 8 comes."""
    rig = rig_of(20, enable_prefix_caching=False)
    rig.submit(1, numbers(8), max_tokens=6)
    rig.step()
    rig.schedule()
    received = (*rig.output(1), 5)
    rig.scheduler.claim((1).to_bytes(16, "big"), 1, received, rig.now_us)  # sends it back with another token
    batch = rig.schedule()
    assert batch is not None and batch.entries[0].attempt == 2 and preempted(batch) == [1]
    rig.post(rig.execute())
    assert rig.output(1) == list(received)
    rig.post(rig.execute())
    assert len(rig.output(1)) == len(received) + 1


def test_without_chunking_a_resume_beyond_the_budget_is_chunked_all_the_same() -> None:
    rig = rig_of(5, budget=8, enable_chunked_prefill=False, enable_prefix_caching=False)
    rig.submit(1, numbers(7), max_tokens=12)
    rig.submit(2, numbers(7, 30), max_tokens=12)
    rig.finish_all(in_flight=2, steps_max=60)
    assert rig.scheduler.load().num_preemptions >= 1
    rig.assert_as_alone(1, 2)


def test_many_requests_in_a_small_pool_all_end() -> None:
    rig = rig_of(7, budget=16)
    for number in range(1, 9):
        rig.submit(number, numbers(3 + number % 4, 10 + number), max_tokens=12)
    rig.finish_all(in_flight=2, steps_max=150)
    for number in range(1, 9):
        rig.assert_as_alone(number)
    assert rig.free_blocks == 7


def test_a_prefill_that_needs_blocks_takes_none_from_this_steps_batch() -> None:
    """Only after a takeover can a prefill's table be too short. Nobody who is in the batch already is pushed out of it."""
    worker = FakeWorker(6, 4)
    rig = Rig(worker=worker)
    rig.submit(1, numbers(8), max_tokens=10)
    rig.submit(2, numbers(8, 30), max_tokens=10)
    rig.step()
    report = worker.attach(replace(rig.epoch, number=2), 1)
    requests = []
    for number, slot in enumerate(report.slots, 1):
        is_first = number == 1
        output = (*slot.token_ids[8:].tolist(), *([11] * 6 if is_first else []))
        held = SlotReport(
            slot.slot,
            slot.request_id,
            slot.attempt,
            8,
            slot.token_ids,
            slot.block_table[:2] if is_first else slot.block_table,
            slot.computed_len,
        )
        request = submission(number, numbers(8, 10 if is_first else 30), SamplingParams(seed=7, max_tokens=10, ignore_eos=True))
        requests.append(RecoveredRequest(request, Arrival(1, number), 0, 1, output, Adoption(WORKER, held), None))
    rig.epoch = replace(rig.epoch, number=2)
    rig.scheduler = type(rig.scheduler)(rig.config, rig.epoch)
    rig.state = type(rig.state)()
    recovered = Recovered(0, tuple(requests), (RecoveredWorker(WORKER, report.description.boot_id, 2, ()),), (), ())
    rig.scheduler.restore(recovered, {WORKER: report}, rig.now_us)
    rig.check()
    assert rig.free_blocks == 1
    batch = rig.schedule()
    assert batch is not None
    assert preempted(batch) == [1, 1], "the old slot, and the sequence itself"
    assert batch.slots.tolist() == [1] and batch.num_decodes == 1
    assert np.array_equal(batch.context_lens, [9])
    rig.finish_all()
    assert rig.output(1)[:7] == list(requests[0].output_token_ids)
    rig.assert_as_alone(2)
