"""A request that had to make room comes back onto what is left of its KV, here or in host memory, and nothing counts twice."""

from dataclasses import replace

import pytest
from fake_worker import MODEL, FakeWorker
from scheduler_rig import Rig

from tessera.values.config import Config


def numbers(count: int, first: int) -> list[int]:
    return [first + index % 29 for index in range(count)]


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_resume_reads_what_is_stored(mode: str, in_flight: int) -> None:
    """Case 95: 7 blocks of 16, two requests of 34 prompt and 35 output tokens, which need 5 blocks each. Case 17 on the way: what a resume
    finds is no hit."""
    model = replace(MODEL, max_model_len=128)
    rig = Rig(
        Config(max_num_seqs=4, max_num_batched_tokens=64, preemption_mode=mode),
        FakeWorker(7, 16, model=model, num_host_blocks=8 if mode == "swap" else 0),
    )
    for number, first in ((1, 2), (2, 33)):
        rig.submit(number, numbers(34, first), max_tokens=35)
    rig.finish_all(in_flight)
    load = rig.scheduler.load()
    assert load.num_preemptions == load.num_swap_outs + (mode == "recompute") == 1
    assert sum(rig.sequence(number).timings.num_preemptions for number in (1, 2)) == 1
    rig.assert_as_alone(1)
    rig.assert_as_alone(2)
    stats = load.prefix_cache
    assert (stats.query_requests, stats.hit_requests, stats.hit_tokens) == (2, 0, 0), "nobody asked for what another had said"
    positions_once = 2 * (34 + 35 - 1)
    if mode == "recompute":
        assert 0 < stats.resume_cached_tokens < 34 + 35
        assert rig.worker.computed_positions < positions_once + 34 + 35
    else:
        assert rig.worker.computed_positions <= positions_once + in_flight, "nothing is computed again"
    assert rig.free_blocks == 7 and not rig.worker.slots


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_cached_tokens_of_a_request_are_those_of_its_first_prefill(mode: str) -> None:
    """What its client is told does not grow by being preempted."""
    rig = Rig(
        Config(max_num_seqs=4, max_num_batched_tokens=64, preemption_mode=mode),
        FakeWorker(8, 4, num_host_blocks=8 if mode == "swap" else 0),
    )
    shared = numbers(8, 10)
    rig.submit(1, [*shared, 60], max_tokens=1)
    rig.finish_all()
    rig.submit(2, [*shared, 61], max_tokens=14)
    rig.submit(3, [*shared, 62], max_tokens=14)
    rig.finish_all(in_flight=2)
    assert rig.scheduler.load().num_preemptions >= 1
    assert [rig.sequence(number).num_cached_tokens for number in (1, 2, 3)] == [0, 8, 8]
    rig.assert_as_alone(2)
    rig.assert_as_alone(3)
