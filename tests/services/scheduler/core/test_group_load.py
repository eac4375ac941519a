"""What gateways are told of the whole group: sums over its workers, rates, and what of the queue is cached."""

import pytest
from fake_worker import FakeWorker
from scheduler_rig import WORKER, Rig

from services.scheduler.core import group_load
from services.scheduler.core.worker_loss import LEFT
from tessera.values.config import Config
from tessera.values.load import WorkerState


def numbers(count: int, first: int = 10) -> list[int]:
    return list(range(first, first + count))


def rig_of(budget: int = 20, num_blocks: int = 40, **config: object) -> Rig:
    return Rig(Config(**{"max_num_seqs": 4, "max_num_batched_tokens": budget, **config}), FakeWorker(num_blocks, 4))


def test_counts_and_tokens_of_kv_follow_the_requests() -> None:
    rig = rig_of(max_num_seqs=1)
    rig.submit(1, numbers(6), max_tokens=4)
    rig.submit(2, numbers(5, 30), max_tokens=4)
    rig.step()
    load = rig.scheduler.load_meter.read(rig.now_us)
    assert (load.num_running, load.num_waiting, load.num_swapped, load.max_running) == (1, 1, 0, 1)
    assert (load.used_kv_tokens, load.total_kv_tokens) == (8, 160)
    (worker,) = load.workers
    assert (worker.address, worker.state, worker.num_running, worker.used_kv_tokens) == (WORKER, WorkerState.SERVING, 1, 8)
    rig.finish_all()
    load = rig.scheduler.load_meter.read(rig.now_us)
    assert (load.num_running, load.num_waiting, load.used_kv_tokens, load.total_kv_tokens) == (0, 0, 0, 160)


def test_a_worker_says_that_it_leaves_and_counts_for_nothing_while_it_is_away() -> None:
    rig = rig_of()
    rig.scheduler.worker_leaves(WORKER)
    assert rig.scheduler.load_meter.read(0).workers[0].state is WorkerState.LEAVING
    rig.scheduler.lose_worker(WORKER, LEFT, rig.now_us)
    load = rig.scheduler.load_meter.read(0)
    assert (load.workers[0].state, load.total_kv_tokens, load.max_running) == (WorkerState.AWAY, 0, 0)


def test_tokens_per_second_are_those_of_the_last_seconds() -> None:
    rig = rig_of()
    meter = rig.scheduler.load_meter
    assert meter.read(0).generation_tokens_per_s == 0
    rig.submit(1, numbers(6), max_tokens=10)
    rig.finish_all()
    assert meter.read(2_000_000).generation_tokens_per_s == 5
    assert meter.read(4_000_000).generation_tokens_per_s == 2.5
    assert meter.read(2_000_000 + group_load.RATE_WINDOW_US).generation_tokens_per_s == 0


def test_what_is_cached_of_the_queue_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_of(max_num_seqs=1)
    rig.submit(1, numbers(9), max_tokens=2)
    rig.finish_all()
    rig.submit(2, numbers(5, 90), max_tokens=9)
    rig.step()
    rig.submit(3, numbers(9), max_tokens=2)
    rig.submit(4, numbers(7), max_tokens=2)
    monkeypatch.setattr(group_load, "LOOKED_UP_REQUESTS_MAX", 0)
    assert rig.scheduler.load_meter.read(0).num_waiting_uncached_tokens == 16
    monkeypatch.setattr(group_load, "LOOKED_UP_REQUESTS_MAX", 2)
    monkeypatch.setattr(group_load, "LOOKED_UP_TOKENS_MAX", 9)
    assert rig.scheduler.load_meter.read(0).num_waiting_uncached_tokens == 1 + 7, "the second is beyond what is looked up"
    assert rig.scheduler.load_meter.read(0).num_waiting_uncached_tokens == 1 + 3, "what is hashed already costs nothing"
    rig.finish_all()
    assert rig.scheduler.load_meter.read(0).prefix_hit_rate == pytest.approx((8 + 4) / (9 + 5 + 9 + 7))
