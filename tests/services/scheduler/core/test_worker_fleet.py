"""Workers that join and leave while requests run, and what is unknown of the slots that they come with."""

import pytest
from fake_worker import FakeWorker
from fleet_rig import LIMITS, FleetRig
from scheduler_rig import own_stop, submission

from services.scheduler.core.admission import Admitted, RefusalReason, Refused
from services.scheduler.core.errors import ModelMismatch
from services.scheduler.core.record import StoredState
from services.scheduler.core.recovery import join
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.sequence_status import SequenceStatus
from tessera.values.identity import Epoch
from tessera.values.model import KVGeometry


def filled_rig(num_workers: int = 2) -> FleetRig:
    """Eight requests in decode, over all workers."""
    rig = FleetRig(num_workers)
    for number in range(1, 9):
        rig.submit(number, [number, 20 + number, 30], max_tokens=8)
    for _ in range(3):
        rig.turn()
    return rig


def assert_all_as_alone(rig: FleetRig) -> None:
    rig.finish_all()
    for number in range(1, 9):
        rig.assert_as_alone(number)


def test_requests_of_a_lost_worker_go_on_elsewhere_at_once() -> None:
    rig = filled_rig()
    tokens = {number: rig.sequence(number).output_token_ids() for number in range(1, 9)}
    rig.lose("worker:0")
    lost = rig.workers.pop("worker:0")
    rig.turn()
    for number in range(1, 9):
        sequence = rig.sequence(number)
        assert sequence.worker == "worker:1" and sequence.output_token_ids()[: len(tokens[number])] == tokens[number]
    assert_all_as_alone(rig)
    # It was only stopped: what it says now is of an attach that nobody listens to any more.
    late = lost.step()
    rig.scheduler.postprocess("worker:0", late, rig.now_us)
    rig.check()
    rig.workers["worker:0"] = lost
    rig.attach("worker:0")
    batch = rig.schedule("worker:0")
    assert batch is not None and batch.num_rows == 0 and len(batch.drops) == 4, "what it still held is dropped"
    rig.execute("worker:0")
    assert not lost.slots


def test_a_removed_worker_leaves_nothing_behind() -> None:
    rig = filled_rig()
    rig.finish_all()
    assert {worker for worker, _ in rig.state.blocks} == {"worker:0", "worker:1"}
    rig.scheduler.remove_worker("worker:0", rig.now_us)
    rig.check()
    assert {worker for worker, _ in rig.state.blocks} == {"worker:1"}, "the journal forgets its cached blocks"
    assert rig.scheduler.replica("worker:0") is None
    assert rig.scheduler.load().num_blocks == 40


def test_requests_of_a_worker_that_is_removed_go_on() -> None:
    rig = filled_rig()
    rig.scheduler.remove_worker("worker:0", rig.now_us)
    rig.scheduler.remove_worker("nobody", rig.now_us)
    del rig.workers["worker:0"]
    rig.check()
    assert rig.scheduler.schedule("worker:0", rig.now_us) is None
    assert_all_as_alone(rig)


def test_when_the_last_worker_is_removed_requests_wait_for_another() -> None:
    rig = filled_rig(1)
    rig.scheduler.remove_worker("worker:0", rig.now_us)
    del rig.workers["worker:0"]
    rig.check()
    assert all(rig.sequence(number).status is SequenceStatus.WAITING for number in range(1, 9))
    assert rig.scheduler.request_len_max == 64, "gateways are still told what fits"
    refused = rig.scheduler.submit(submission(99, [1, 2, 3]), 0, (), rig.now_us)
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.NO_WORKER and refused.retry_after_ms > 0
    rig.join("worker:7")
    assert_all_as_alone(rig)


def test_a_worker_that_joins_gets_work_and_one_removed_may_come_again() -> None:
    rig = filled_rig()
    rig.scheduler.remove_worker("worker:0", rig.now_us)
    rig.check()
    rig.workers["worker:0"].restart()
    rig.attach("worker:0")
    rig.turn()
    assert len(rig.workers["worker:0"].slots) == 4
    assert_all_as_alone(rig)


@pytest.mark.parametrize(("block_size", "kv_format"), [(8, "fake/int64"), (4, "other")])
def test_a_worker_whose_kv_lies_otherwise_is_turned_away(block_size: int, kv_format: str) -> None:
    rig = filled_rig(1)
    stranger = FakeWorker(40, block_size, LIMITS)
    stranger.geometry = KVGeometry(40, block_size, 8, kv_format)
    stranger.restart()
    with pytest.raises(ModelMismatch, match=r"blocks of 4 tokens \(fake/int64\)"):
        rig.scheduler.attach_worker("stranger", stranger.attach(rig.epoch, 99), rig.now_us)
    rig.check()
    assert rig.scheduler.replica("stranger") is None
    assert_all_as_alone(rig)


def taken_over_without(rig: FleetRig, late: str, state: StoredState) -> FleetRig:
    """The next leader joins `state` and all workers but `late`."""
    rig.epoch = Epoch(rig.epoch.number + 1, b"leader")
    reports = {}
    for name, worker in rig.workers.items():
        if name != late:
            rig.nonce += 1
            reports[name] = worker.attach(rig.epoch, rig.nonce)
    rig.scheduler = Scheduler(rig.config, rig.epoch)
    rig.scheduler.restore(join(state, reports, [], own_stop), reports, rig.now_us)
    rig.state = StoredState()
    rig.check()
    return rig


def test_a_worker_that_comes_after_the_join_goes_on_with_its_slots() -> None:
    rig = filled_rig()
    rig = taken_over_without(rig, "worker:0", rig.state)
    assert rig.scheduler.load().num_waiting == 4
    rig.attach("worker:0")
    assert rig.scheduler.load().num_waiting == 0
    replica = rig.scheduler.replica("worker:0")
    assert replica is not None
    admissions = [sequence.admission for sequence in replica.running.values()]
    assert admissions == sorted(admissions) and len(set(admissions)) == 4, "the order of victims is whole"
    assert_all_as_alone(rig)
    positions = sum(rig.sequence(number).ledger.num_tokens - 1 for number in (1, 3, 5, 7))
    assert rig.workers["worker:0"].computed_positions == positions, "nothing is computed twice"


def test_unknown_slots_of_a_late_worker_are_orphans_until_the_grace_ends() -> None:
    rig = filled_rig()
    sequences = {number: rig.sequence(number) for number in range(1, 9)}
    ours = [number for number, sequence in sequences.items() if sequence.worker == "worker:0"]
    rig = taken_over_without(rig, "worker:0", StoredState())
    rig.attach("worker:0")
    replica = rig.scheduler.replica("worker:0")
    assert replica is not None and len(replica.orphans) == 4 and not replica.drops
    first = sequences[ours[0]]
    admitted = rig.scheduler.submit(first.submission, 1, first.output_token_ids(), rig.now_us)
    assert isinstance(admitted, Admitted)
    rig.check()
    assert rig.sequence(ours[0]).worker == "worker:0", "claimed late, its slot is still there"
    rig.scheduler.expire_orphans()
    rig.check()
    batch = rig.schedule("worker:0")
    assert batch is not None and len(batch.drops) == 3
    while rig.turn():
        pass
    rig.assert_as_alone(ours[0])


def test_a_slot_of_a_request_that_ended_here_is_no_orphan() -> None:
    """It ended, and was forgotten, while its worker was cut off."""
    rig = filled_rig()
    ours = [number for number in range(1, 9) if rig.sequence(number).worker == "worker:0"]
    rig.lose("worker:0")
    for number in range(1, 9):
        rig.scheduler.abort(number.to_bytes(16, "big"), rig.now_us)
    rig.now_us += 1000 * rig.config.result_retention_ms
    rig.scheduler.forget_finished(rig.now_us)
    rig.check()
    rig.attach("worker:0")
    replica = rig.scheduler.replica("worker:0")
    assert replica is not None and not replica.orphans and len(replica.drops) == len(ours) == 4


def test_unknown_slots_of_a_worker_that_comes_after_the_grace_are_dropped() -> None:
    rig = taken_over_without(filled_rig(), "worker:0", StoredState())
    rig.scheduler.expire_orphans()
    rig.attach("worker:0")
    replica = rig.scheduler.replica("worker:0")
    assert replica is not None and not replica.orphans and len(replica.drops) == 4


def test_nobody_is_put_into_an_orphan_of_a_lost_worker() -> None:
    rig = filled_rig()
    sequences = {number: rig.sequence(number) for number in range(1, 9)}
    ours = next(number for number, sequence in sequences.items() if sequence.worker == "worker:0")
    rig = taken_over_without(rig, "", StoredState())
    rig.lose("worker:0")
    first = sequences[ours]
    rig.scheduler.submit(first.submission, 1, first.output_token_ids(), rig.now_us)
    rig.check()
    assert rig.sequence(ours).status is SequenceStatus.WAITING
    rig.turn()
    assert rig.sequence(ours).worker == "worker:1"


def test_an_output_of_a_removed_worker_is_a_no_op() -> None:
    rig = filled_rig()
    rig.schedule("worker:0")
    rig.scheduler.remove_worker("worker:0", rig.now_us)
    rig.check()
    before = [sequence.output_token_ids() for sequence in rig.scheduler.requests()]
    rig.scheduler.postprocess("worker:0", rig.workers.pop("worker:0").step(), rig.now_us)
    rig.check()
    assert before == [sequence.output_token_ids() for sequence in rig.scheduler.requests()]
    assert_all_as_alone(rig)


@pytest.mark.parametrize(("block_size", "kv_format"), [(8, "fake/int64"), (4, "other"), (1, "other")])
@pytest.mark.parametrize("names", [["worker:0", "worker:1"], ["worker:1", "worker:0"], ["other:0"]])
def test_where_no_worker_is_left_the_next_one_says_how_kv_lies(block_size: int, kv_format: str, names: list[str]) -> None:
    """Tokens are kept and KV is computed again; what the others had cached is forgotten, here and in the journal."""
    rig = filled_rig()
    for _ in range(3):
        rig.turn()
    tokens = {number: rig.sequence(number).output_token_ids() for number in range(1, 9)}
    assert all(tokens.values())
    for name in list(rig.workers):
        rig.lose(name)
    rig.workers.clear()
    for name in names:
        worker = rig.workers[name] = FakeWorker(160 // block_size, block_size, LIMITS)
        worker.geometry = KVGeometry(160 // block_size, block_size, 8, kv_format)
        worker.boots = 1000 + len(rig.workers)
        worker.restart()
        rig.attach(name)
    assert rig.scheduler.layout == (block_size, kv_format)
    assert {replica for replica in ("worker:0", "worker:1", "other:0") if rig.scheduler.replica(replica)} == set(names)
    assert {worker for worker, _ in rig.state.blocks} <= set(names)
    for number, output in tokens.items():
        assert rig.sequence(number).output_token_ids() == output
    assert_all_as_alone(rig)
    for number in range(1, 9):  # under digests of its own blocks
        prompt = rig.sequence(number).ledger.token_ids[:].tolist()
        again = rig.submit(10 + number, prompt, max_tokens=1)
        rig.finish_all()
        assert again.num_cached_tokens == (len(prompt) - 1) // block_size * block_size
    with pytest.raises(ModelMismatch, match=rf"blocks of {block_size} tokens \({kv_format}\).*--block-size"):
        rig.join("old", 40)


def test_one_that_is_there_decides_how_kv_lies_whoever_is_away() -> None:
    rig = filled_rig()
    rig.kill("worker:0")
    rig.workers["worker:0"].geometry = KVGeometry(20, 8, 8, "fake/int64")
    rig.workers["worker:0"].restart()
    with pytest.raises(ModelMismatch, match="worker:0 has KV blocks of 8 tokens"):
        rig.attach("worker:0")
    rig.check()
    del rig.workers["worker:0"]
    assert_all_as_alone(rig)
