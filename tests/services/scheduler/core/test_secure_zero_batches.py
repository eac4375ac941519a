"""With secure_zero no request computes in a block that still holds another tenant's KV; read back from the worker's memory."""

import pytest
from fake_worker import FakeWorker
from scheduler_rig import Rig

from tessera.values.config import Config


def rig_of(secure_zero: bool) -> Rig:
    """A pool of four blocks of four, all of which anna had."""
    rig = Rig(Config(max_num_seqs=8, max_num_batched_tokens=64, secure_zero=secure_zero), FakeWorker(4, 4))
    rig.submit(1, list(range(10, 25)), max_tokens=1, cache_salt="anna")
    rig.finish_all()
    return rig


@pytest.mark.parametrize("secure_zero", [True, False])
def test_what_another_tenant_left_is_gone_before_the_first_row(secure_zero: bool) -> None:
    rig = rig_of(secure_zero)
    left = set(rig.worker.kv.flatten().tolist()) - {-1}
    rig.submit(2, [50, 51], max_tokens=8, cache_salt="bert")
    seen = []
    while rig.step():
        table = rig.sequence(2).table.block_ids or seen[-1][0]
        seen.append((list(table), bool(left & set(rig.worker.kv[table].flatten().tolist()))))
    assert any(is_left for _, is_left in seen) is not secure_zero
    rig.assert_as_alone(2)
    zeroed = [block_id for batch in rig.batches for block_id in batch.zero_blocks.tolist()]
    assert zeroed[:4] == ([0, 1, 2, 3] if secure_zero else []), "of a new worker nobody knows what its memory holds"
    assert len(zeroed[4:]) == (3 if secure_zero else 0), "bert's nine positions take three blocks"


def test_the_next_block_of_a_running_request_is_zeroed_as_well() -> None:
    rig = rig_of(secure_zero=True)
    rig.submit(2, [50, 51], max_tokens=8, cache_salt="bert")
    num_before = len(rig.batches)
    rig.finish_all()
    zeroed = [batch.zero_blocks.tolist() for batch in rig.batches[num_before:]]
    assert [len(blocks) for blocks in zeroed if blocks] == [1, 1, 1]


def test_a_tenants_own_hits_are_kept() -> None:
    rig = rig_of(secure_zero=True)
    rig.submit(2, list(range(10, 25)), max_tokens=1, cache_salt="anna")
    rig.finish_all()
    assert rig.sequence(2).num_cached_tokens == 12
    rig.assert_as_alone(2)
