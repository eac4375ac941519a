"""Prompts that begin alike and come at once: what they share is computed once, and nobody waits longer than for that."""

import pytest
from fake_worker import FakeWorker
from scheduler_rig import Rig

from tessera.values.config import Config
from tessera.values.model import WorkerLimits

BLOCK = 4


def numbers(count: int, first: int) -> list[int]:
    return [10 + (first + 7 * index) % 50 for index in range(count)]


SHARED = numbers(40, 3)


def rig_of(budget: int, seats: int = 8, **config: object) -> Rig:
    limits = WorkerLimits(max_num_seqs=seats, max_num_batched_tokens=128)
    return Rig(Config(**{"max_num_seqs": seats, "max_num_batched_tokens": budget, **config}), FakeWorker(200, BLOCK, limits))


def prompt_of(number: int) -> list[int]:
    return [*SHARED, number, *numbers(5, number)]


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("budget", [16, 40, 64, 128])
def test_a_common_beginning_is_computed_once(budget: int, in_flight: int) -> None:
    rig = rig_of(budget, max_batches_in_flight=in_flight)
    family = range(1, 7)
    for number in family:
        rig.submit(number, prompt_of(number), max_tokens=4)
    rig.finish_all(in_flight)
    rig.assert_as_alone(*family)
    own = len(prompt_of(1)) - len(SHARED)
    assert rig.worker.computed_positions == len(SHARED) + len(family) * (own + 3)


def test_who_shares_less_goes_on_sooner() -> None:
    rig = rig_of(16, long_prefill_token_threshold=8)
    rig.submit(1, prompt_of(1), max_tokens=2)
    rig.submit(2, [*SHARED[:8], *numbers(9, 30)], max_tokens=2)
    rig.step()
    assert rig.sequence(2).slot is None
    rig.step()  # the eight positions that they share are published
    assert rig.sequence(2).slot is not None and rig.sequence(2).num_cached_tokens == 8
    assert rig.sequence(1).output_len == 0, "whose prompt is not computed yet"
    rig.finish_all()
    rig.assert_as_alone(1, 2)


def test_who_shares_nothing_passes_those_that_wait() -> None:
    rig = rig_of(64)
    for number in (1, 2):
        rig.submit(number, prompt_of(number), max_tokens=2)
    rig.submit(3, numbers(6, 40), max_tokens=2)
    batch = rig.schedule()
    assert batch is not None and [int.from_bytes(entry.request_id, "big") for entry in batch.entries] == [1, 3]


def test_nobody_waits_for_who_has_gone() -> None:
    rig = rig_of(16)
    ids = [rig.submit(number, prompt_of(number), max_tokens=2) for number in (1, 2, 3)]
    rig.step()
    rig.scheduler.abort(ids[0], rig.now_us)
    rig.finish_all()
    rig.assert_as_alone(2, 3)


def test_nobody_waits_for_who_has_failed_while_another_batch_was_put_together() -> None:
    rig = rig_of(128, max_batches_in_flight=2)
    ids = [rig.submit(number, prompt_of(number), max_tokens=2) for number in (1, 2)]
    rig.schedule()
    batch = rig.schedule()
    assert batch is not None and not batch.entries, "the second waits for the first"
    rig.worker.fail_next_row(ids[0])
    rig.post(rig.execute())
    rig.finish_all(2)
    rig.assert_as_alone(2)


def test_tenants_do_not_wait_for_each_other() -> None:
    rig = rig_of(128)
    for number, salt in ((1, "one"), (2, "another")):
        rig.submit(number, prompt_of(number), max_tokens=2, cache_salt=salt)
    batch = rig.schedule()
    assert batch is not None and len(batch.entries) == 2


def test_without_a_prefix_cache_nobody_waits() -> None:
    rig = rig_of(128, enable_prefix_caching=False)
    for number in (1, 2):
        rig.submit(number, prompt_of(number), max_tokens=2)
    batch = rig.schedule()
    assert batch is not None and len(batch.entries) == 2
