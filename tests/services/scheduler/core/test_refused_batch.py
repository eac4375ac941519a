"""A batch that no correct scheduler sends: the worker refuses it, and everybody goes on."""

import pytest
from fake_worker import FakeWorker
from scheduler_rig import WORKER, Rig

from services.scheduler.core.worker_loss import LossKind, WorkerLoss
from tessera.values.config import Config


def test_a_step_beyond_the_workers_limit_costs_nobody_his_request() -> None:
    """Case 36, by fault injection: one position more than the budget. The batch is refused, and the stream begins anew."""
    rig = Rig(Config(max_num_seqs=4, max_num_batched_tokens=16), FakeWorker(40, 4))
    rig.submit(1, list(range(10, 16)), max_tokens=5)
    rig.step()
    rig.submit(2, list(range(20, 50)), max_tokens=5)
    replica = rig.scheduler.replica(WORKER)
    assert replica is not None
    replica.tokens_max = rig.worker.limits.max_num_batched_tokens + 1
    rig.submit(3, [11] * 60, max_tokens=2)
    batch = rig.scheduler.schedule(WORKER, rig.now_us)
    assert batch is not None and batch.total_tokens > 64
    with pytest.raises(AssertionError, match="tokens"):
        rig.worker.enqueue(batch)
    refused = WorkerLoss(LossKind.REFUSED, batch.step_id, "65 positions, max_num_batched_tokens is 64")
    rig.scheduler.lose_worker(WORKER, refused, rig.now_us)
    rig.check()
    rig.attach()
    rig.finish_all(in_flight=2)
    for number in (1, 2, 3):
        rig.assert_as_alone(number)
    assert rig.free_blocks == 40 and not rig.worker.slots
