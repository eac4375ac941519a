"""A scheduler that is told to pause, and to go on."""

import pytest
from fake_worker import FakeWorker
from fleet_rig import FleetRig
from scheduler_rig import Rig

from tessera.values.config import Config
from tessera.values.finish import FinishReason


def numbers(count: int, first: int = 10) -> list[int]:
    return list(range(first, first + count))


def rig_of(**config: object) -> Rig:
    return Rig(Config(**{"max_num_seqs": 4, "max_num_batched_tokens": 16, **config}), FakeWorker(40, 4))


@pytest.mark.parametrize("in_flight", [1, 2])
def test_pausing_again_and_again_loses_no_slot(in_flight: int) -> None:
    """Case 93: pause, submit 3, resume, ten times."""
    rig = rig_of()
    for turn in range(10):
        rig.scheduler.pause()
        for number in range(3 * turn, 3 * turn + 3):
            rig.submit(number, numbers(5, 10 + turn), max_tokens=4)
        assert rig.schedule() is None
        rig.scheduler.resume()
        rig.step(in_flight)
        rig.step(in_flight)
    rig.finish_all(in_flight)
    load = rig.scheduler.load()
    assert (load.num_running, load.num_waiting, load.num_finished, load.num_free_blocks) == (0, 0, 30, 40)
    assert not rig.worker.slots
    for number in range(30):
        rig.assert_as_alone(number)


def test_what_is_in_flight_ends_and_counts_and_nothing_follows() -> None:
    rig = rig_of()
    rig.submit(1, numbers(5), max_tokens=9)
    rig.step()
    rig.schedule()
    rig.schedule()
    rig.scheduler.pause()
    rig.scheduler.pause()  # twice is once
    rig.post(rig.execute())
    rig.post(rig.execute())
    assert len(rig.output(1)) == 3
    assert not rig.step(), "nothing is issued"
    assert (rig.scheduler.load().num_running, rig.free_blocks) == (1, 38)
    rig.scheduler.resume()
    rig.finish_all(in_flight=2)
    rig.assert_as_alone(1)
    assert sum(len(batch.entries) for batch in rig.batches) == 1, "it kept its slot"


def test_requests_end_and_workers_come_while_paused() -> None:
    rig = rig_of()
    rig.submit(1, numbers(5), max_tokens=9)
    rig.submit(2, numbers(5, 30), max_tokens=9)
    rig.step()
    rig.scheduler.pause()
    rig.scheduler.abort((1).to_bytes(16, "big"), rig.now_us)
    rig.attach()
    assert rig.reason(1) is FinishReason.ABORTED and rig.schedule() is None
    rig.scheduler.resume()
    rig.finish_all()
    rig.assert_as_alone(2)
    assert rig.free_blocks == 40 and not rig.worker.slots


def test_a_round_of_a_lockstep_group_that_has_begun_goes_to_everybody() -> None:
    """Its members compute together: without the others the first one would not come back."""
    rig = FleetRig(2, lockstep=True)
    rig.submit(1, numbers(5), max_tokens=9)
    assert rig.schedule("worker:0") is not None
    rig.scheduler.pause()
    batch = rig.schedule("worker:1")
    assert batch is not None and batch.is_dummy_run
    rig.turn()
    assert not rig.turn(), "nothing is issued"
    rig.scheduler.resume()
    rig.finish_all()
    rig.assert_as_alone(1)
