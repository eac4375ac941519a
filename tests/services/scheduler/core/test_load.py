"""What a scheduler says of itself: counts, totals, what its next batch would be, whether there is room."""

import pytest
from fake_worker import FakeWorker
from scheduler_rig import WORKER, Rig, own_stop, submission

from kv_manager.prefix_cache_stats import PrefixCacheStats
from services.scheduler.core.admission import RefusalReason, Refused
from services.scheduler.core.outlook import FitsLater, FitsNow, NextBatchInfo
from services.scheduler.core.record import StoredState
from services.scheduler.core.recovery import join
from services.scheduler.core.scheduler import Scheduler
from tessera.values.config import Config
from tessera.values.identity import Epoch


def numbers(count: int, first: int = 10) -> list[int]:
    return list(range(first, first + count))


def rig_of(budget: int = 20, num_blocks: int = 40, **config: object) -> Rig:
    return Rig(Config(**{"max_num_seqs": 4, "max_num_batched_tokens": budget, **config}), FakeWorker(num_blocks, 4))


def test_counts_follow_a_request_through_its_life() -> None:
    rig = rig_of(max_num_seqs=1)
    rig.submit(1, numbers(6), max_tokens=2)
    rig.submit(2, numbers(5, 30), max_tokens=2)
    load = rig.scheduler.load()
    assert (load.num_waiting, load.num_queued_tokens, load.num_running) == (2, 11, 0)
    assert (rig.scheduler.num_unfinished, rig.scheduler.has_unfinished) == (2, True)
    rig.schedule()
    load = rig.scheduler.load()
    assert (load.num_waiting, load.num_queued_tokens, load.num_running, load.num_batches_in_flight) == (1, 5, 1, 1)
    assert (load.num_blocks, load.num_free_blocks, load.num_swapped) == (40, 38, 0)
    assert rig.scheduler.num_unfinished == 2
    rig.post(rig.execute())
    rig.finish_all(in_flight=2)
    load = rig.scheduler.load()
    assert (load.num_finished, load.num_running, load.num_batches_in_flight, load.num_free_blocks) == (2, 0, 0, 40)
    assert (rig.scheduler.num_unfinished, rig.scheduler.has_unfinished) == (0, False)


def test_totals_count_ends_by_the_reason_that_stands_and_stay_when_requests_are_forgotten() -> None:
    rig = rig_of(result_retention_ms=0)
    rig.submit(1, numbers(4), max_tokens=3)
    rig.submit(2, numbers(4, 30), max_tokens=5)
    rig.submit(3, numbers(4, 50), max_tokens=5)
    rig.step()
    rig.scheduler.abort((3).to_bytes(16, "big"), rig.now_us)
    rig.finish_all()
    load = rig.scheduler.load()
    assert (load.num_submitted, load.num_ended, load.num_output_tokens) == (3, {"max_tokens": 2, "aborted": 1}, 3 + 5 + 1)
    assert load.num_sampled_tokens == 3 + 5 + 1
    rig.scheduler.stop_found((2).to_bytes(16, "big"), 2, "x", rig.now_us)
    rig.scheduler.stop_found((2).to_bytes(16, "big"), 1, "y", rig.now_us)
    rig.check()
    rig.scheduler.forget_finished(rig.now_us + 1)
    load = rig.scheduler.load()
    assert load.num_finished == 0
    assert (load.num_ended, load.num_output_tokens) == ({"max_tokens": 1, "aborted": 1, "stop_string": 1}, 3 + 1 + 1)


def test_a_new_leader_counts_from_nothing() -> None:
    """What ended under the one before is readable, and was counted there."""
    rig = rig_of()
    rig.submit(1, numbers(4), max_tokens=3)
    rig.finish_all()
    rig.submit(2, numbers(4, 30), max_tokens=3)
    rig.step()
    rig.epoch = Epoch(2, b"leader")
    report = rig.worker.attach(rig.epoch, 1)
    rig.scheduler = Scheduler(rig.config, rig.epoch)
    rig.scheduler.restore(join(rig.state, {WORKER: report}, [], own_stop), {WORKER: report}, rig.now_us)
    load = rig.scheduler.load()
    assert (load.num_finished, load.num_running, load.num_submitted, load.num_ended, load.num_output_tokens) == (1, 1, 0, {}, 0)
    rig.state = StoredState()
    rig.nonce = 1
    rig.finish_all()
    load = rig.scheduler.load()
    assert (load.num_finished, load.num_ended, load.num_output_tokens) == (2, {"max_tokens": 1}, 3)


def test_hits_are_counted_once_and_outlive_an_attach() -> None:
    rig = rig_of()
    for number in (1, 2):
        rig.submit(number, numbers(9), max_tokens=1)
        rig.finish_all()
    hits = PrefixCacheStats(query_requests=2, hit_requests=1, query_tokens=18, hit_tokens=8)
    assert rig.scheduler.load().prefix_cache == hits
    rig.attach()
    assert rig.scheduler.load().prefix_cache == hits


def test_the_next_batch_is_told_before_it_is_made() -> None:
    """ATOM's `get_next_batch_info`: whether it prefills, how many tokens, how many requests."""
    rig = rig_of()
    assert rig.scheduler.next_batch_info("nobody") is None
    assert rig.scheduler.next_batch_info(WORKER) == NextBatchInfo(False, 0, 0)
    rig.submit(1, numbers(6), max_tokens=9)
    assert rig.scheduler.next_batch_info(WORKER) == NextBatchInfo(True, 6, 1)
    rig.step()
    assert rig.scheduler.next_batch_info(WORKER) == NextBatchInfo(False, 1, 1)
    rig.submit(2, numbers(25, 30), max_tokens=9)
    assert rig.scheduler.next_batch_info(WORKER) == NextBatchInfo(True, 20, 2)
    batch = rig.schedule()
    assert batch is not None and (batch.total_tokens, batch.num_rows) == (20, 2)
    rig.post(rig.execute())
    assert rig.scheduler.next_batch_info(WORKER) == NextBatchInfo(True, 1 + 6, 2), "the rest of a prompt"


def test_where_prefills_go_first_the_next_batch_is_all_prefill() -> None:
    rig = rig_of(policy="prefill_first")
    rig.submit(1, numbers(6), max_tokens=9)
    rig.step()
    rig.submit(2, numbers(5, 30), max_tokens=9)
    assert rig.scheduler.next_batch_info(WORKER) == NextBatchInfo(True, 5, 1)
    rig.step()
    assert rig.scheduler.next_batch_info(WORKER) == NextBatchInfo(False, 2, 2)


def test_the_next_batch_counts_nobody_without_a_seat() -> None:
    rig = rig_of(max_num_seqs=1)
    rig.submit(1, numbers(3), max_tokens=9)
    rig.step()
    rig.submit(2, numbers(3, 30), max_tokens=9)
    assert rig.scheduler.next_batch_info(WORKER) == NextBatchInfo(False, 1, 1)


def test_room_is_there_now_later_or_never() -> None:
    """The low-level API's allocation status, as values with their numbers."""
    rig = rig_of(num_blocks=4, enable_prefix_caching=False)
    asked = submission(2, numbers(9, 30))
    assert rig.scheduler.allocation_status(asked) == FitsNow(WORKER, 3, 4)
    rig.submit(1, numbers(7), max_tokens=4)
    rig.step()
    assert rig.scheduler.allocation_status(asked) == FitsLater(WORKER, 3, 2, 3)
    never = rig.scheduler.allocation_status(submission(3, numbers(17)))
    assert isinstance(never, Refused) and never.reason is RefusalReason.TOO_LONG
    rig.finish_all()
    assert rig.scheduler.allocation_status(asked) == FitsNow(WORKER, 3, 4)
    assert rig.scheduler.load().num_submitted == 1, "asking takes nothing"


def test_a_prefix_that_somebody_holds_costs_no_room() -> None:
    rig = rig_of(num_blocks=4)
    rig.submit(1, numbers(9), max_tokens=4)
    rig.step()
    assert rig.scheduler.allocation_status(submission(2, [*numbers(8), 60])) == FitsNow(WORKER, 1, 1)


@pytest.mark.parametrize("moment", ["seats", "leaving"])
def test_room_needs_a_seat_on_a_worker_that_stays(moment: str) -> None:
    rig = rig_of(max_num_seqs=1)
    if moment == "seats":
        rig.submit(1, numbers(3), max_tokens=4)
        rig.step()
        assert rig.scheduler.allocation_status(submission(2, numbers(3))) == FitsLater(WORKER, 1, 39, 0)
    else:
        rig.scheduler.worker_leaves(WORKER)
        nobody = rig.scheduler.allocation_status(submission(2, numbers(3)))
        assert isinstance(nobody, Refused) and nobody.reason is RefusalReason.NO_WORKER and nobody.retry_after_ms > 0
