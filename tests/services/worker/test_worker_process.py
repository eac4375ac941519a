"""A real worker process, commanded as a scheduler would, and as one would not."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from worker_process import (
    GREEDY,
    TIMEOUT_S,
    VOCAB,
    Execution,
    Gate,
    WorkerProcess,
    batch_of,
    entry,
    int32,
    leader,
    report_of,
    swap,
    worker_process,
)

from model_worker.models.deterministic import next_tokens
from services.worker import convert
from services.worker.servicer import SERVICE_NAME
from tessera.values.batch import SlotDrop
from tessera.values.identity import Epoch
from tessera.values.protocol import PROTOCOL_VERSION
from tessera.values.report import WorkerReport
from tessera.worker.v1 import worker_pb2, worker_pb2_grpc

PROMPT = [5, 17, 3, 88, 41, 9]


def continuation(prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_tokens(ids, VOCAB)[0])
    return ids[len(prompt) :]


@dataclass
class Leader:
    """A scheduler with a term of its own on a worker that holds nothing; it counts nonces and steps."""

    worker: WorkerProcess
    epoch: Epoch
    nonce: int = 0
    step: int = 0
    calls: list[Any] = field(default_factory=list)

    def attach(self) -> WorkerReport:
        self.nonce += 1
        report = self.worker.attach(self.epoch, self.nonce)
        self.step = report.last_step
        return report

    def execute(self) -> Execution:
        execution = self.worker.execute(self.epoch, self.nonce)
        self.calls.append(execution.call)
        return execution


@pytest.fixture(scope="module")
def shared_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    with worker_process(tmp_path_factory.mktemp("worker")) as worker:
        yield worker


@pytest.fixture
def one(shared_worker: WorkerProcess, request: pytest.FixtureRequest) -> Iterator[Leader]:
    """A new leader after whoever led in the test before; the slots it found are dropped."""
    held = shared_worker.stub.Describe(worker_pb2.DescribeRequest()).epoch
    new = Leader(shared_worker, leader(held.number + 1))
    report = new.attach()
    drops = [SlotDrop(slot.slot, slot.request_id, slot.attempt) for slot in report.slots]
    new.step += 1
    new.execute().run(new.step, drops=drops)
    new.attach()
    yield new
    assert shared_worker.process.poll() is None, "nothing here ends a worker"
    for call in new.calls:
        call.cancel()


def reason_of(error: grpc.RpcError | None) -> tuple[grpc.StatusCode, str]:
    assert error is not None, "the stream ended with OK"
    return error.code(), error.details()


def test_a_worker_describes_itself(one: Leader) -> None:
    response = one.worker.stub.Describe(worker_pb2.DescribeRequest())
    description = convert.description_from_proto(response.description)
    assert description.model.architecture == "Deterministic" and description.model.vocab_size == VOCAB
    geometry = description.geometry
    assert (geometry.num_blocks, geometry.block_size, geometry.num_host_blocks) == (64, 16, 20)
    assert convert.epoch_from_proto(response.epoch) == one.epoch
    assert one.attach().description == description


def test_two_batches_in_flight_run_in_order(one: Leader) -> None:
    execution = one.execute()
    one.worker.gate.arm()
    execution.send(one.step + 1, [(0, 6, 6)], [entry(0, PROMPT, [3], "a")])
    one.worker.gate.wait_started()
    execution.send(one.step + 2, [(0, 1, 7)])
    one.worker.gate.disarm()
    one.worker.gate.let_go()
    outputs = [execution.output(), execution.output()]
    assert [output.step_id for output in outputs] == [one.step + 1, one.step + 2]
    assert [output.nonce for output in outputs] == [one.nonce] * 2 and outputs[0].epoch == one.epoch
    assert [output.token_ids.tolist() for output in outputs] == [[token] for token in continuation(PROMPT, 2)]


def test_a_fourth_batch_in_flight_is_refused_and_poisons_the_stream(one: Leader) -> None:
    execution = one.execute()
    one.worker.gate.arm()
    execution.send(one.step + 1, [(0, 6, 6)], [entry(0, PROMPT, [3], "a")])
    one.worker.gate.wait_started()
    execution.send(one.step + 2, [(0, 1, 7)])
    execution.send(one.step + 3, [(0, 1, 8)])
    execution.send(one.step + 4, [(0, 1, 9)])
    refused = execution.next("refused")
    assert refused.step_id == one.step + 4 and "3 batches are in flight" in refused.reason
    execution.send(one.step + 5, [(0, 1, 7)])
    one.worker.gate.disarm()
    one.worker.gate.let_go()
    assert execution.output().step_id == one.step + 1
    before = one.step
    report = one.attach()
    assert report.last_step == before + 1
    assert report.slots[0].token_ids.tolist() == PROMPT + continuation(PROMPT, 1)


def test_nothing_runs_behind_a_refused_batch(one: Leader) -> None:
    execution = one.execute()
    execution.send(one.step + 1, [(0, 1, 7)])
    execution.send(one.step + 2, [(1, 6, 6)], [entry(1, PROMPT, [3], "a")])
    refused = execution.next("refused")
    assert refused.step_id == one.step + 1 and "slot 0, which is free" in refused.reason
    before = one.step
    report = one.attach()
    assert report.last_step == before and report.slots == ()
    assert one.execute().run(one.step + 1, [(1, 6, 6)], [entry(1, PROMPT, [3], "a")]).token_ids.tolist() == continuation(
        PROMPT, 1
    )


def test_a_malformed_batch_is_refused(one: Leader) -> None:
    execution = one.execute()
    message = convert.batch_to_proto(batch_of(execution.under, one.step + 1, [(0, 6, 6)], [entry(0, PROMPT, [3], "a")]))
    message.context_lens = b"123"
    execution.send_message(message)
    assert "context_lens" in execution.next("refused").reason
    assert one.attach().slots == ()


def test_an_attach_fences_at_once_and_discards_what_has_not_started(one: Leader) -> None:
    execution = one.execute()
    one.worker.gate.arm()
    execution.send(one.step + 1, [(0, 6, 6)], [entry(0, PROMPT, [3], "a")])
    one.worker.gate.wait_started()
    execution.send(one.step + 2, [(0, 1, 7)])
    call = one.worker.attach_call(one.epoch, one.nonce + 1)
    code, details = reason_of(execution.end())  # while the batch still computes
    assert code is grpc.StatusCode.ABORTED and "attach again" in details
    one.worker.gate.disarm()
    one.worker.gate.let_go()
    report = report_of(call)
    assert (report.nonce, report.last_step) == (one.nonce + 1, one.step + 1)
    (slot,) = report.slots
    assert slot.token_ids.tolist() == PROMPT + continuation(PROMPT, 1)
    assert (slot.request_id, slot.attempt, slot.computed_len) == (b"a".ljust(16, b"."), 1, 6)
    assert report.last_write_step[3] == one.step + 1


def test_a_higher_epoch_takes_over_and_the_older_one_is_told(one: Leader) -> None:
    execution = one.execute()
    execution.run(one.step + 1, [(0, 6, 6)], [entry(0, PROMPT, [3], "a")])
    two = Leader(one.worker, leader(one.epoch.number + 1, "two"))
    report = two.attach()
    assert report.slots[0].token_ids.tolist() == PROMPT + continuation(PROMPT, 1)

    error = execution.end()
    code, details = reason_of(error)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert details.startswith("older epoch") and f"epoch {two.epoch.number} " in details
    (detail,) = rpc_status.from_call(error).details
    assert str(two.epoch.number).encode() in detail.value and two.epoch.instance.hex().encode() in detail.value

    for epoch, nonce in [(one.epoch, 99), (leader(two.epoch.number, "three"), 99), (two.epoch, two.nonce)]:
        with pytest.raises(grpc.RpcError) as refused:
            one.worker.attach(epoch, nonce)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert refused.value.details().startswith("older epoch")
    code, details = reason_of(one.worker.execute(one.epoch, 1).end())
    assert code is grpc.StatusCode.FAILED_PRECONDITION and "older epoch" in details

    # None of that disturbed the new leader.
    assert two.execute().run(two.step + 1, [(0, 1, 7)]).token_ids.tolist() == continuation(PROMPT, 2)[1:]


def test_a_stream_that_breaks_loses_nothing_that_had_started(one: Leader) -> None:
    execution = one.execute()
    one.worker.gate.arm()
    execution.send(one.step + 1, [(0, 6, 6)], [entry(0, PROMPT, [3], "a")])
    one.worker.gate.wait_started()
    execution.send(one.step + 2, [(0, 1, 7)])
    execution.call.cancel()
    one.worker.gate.disarm()
    one.worker.gate.let_go()
    before = one.step
    report = one.attach()
    assert report.slots[0].token_ids[:7].tolist() == PROMPT + continuation(PROMPT, 1)
    assert report.slots[0].computed_len == len(report.slots[0].token_ids) - 1
    assert report.last_step in (before + 1, before + 2)  # the second may have started before the cancel arrived
    assert one.execute().run(one.step + 1, [(0, 1, report.slots[0].computed_len + 1)]).token_counts.tolist() == [1]


def test_heartbeats_go_on_through_a_long_forward_pass(one: Leader) -> None:
    execution = one.execute()
    one.worker.gate.arm()
    execution.send(one.step + 1, [(0, 6, 6)], [entry(0, PROMPT, [3], "a")])
    one.worker.gate.wait_started()
    for _ in range(6):
        beat = next(execution.call).heartbeat
        assert (convert.epoch_from_proto(beat.epoch), beat.nonce) == (one.epoch, one.nonce)
    one.worker.gate.disarm()
    one.worker.gate.let_go()
    assert execution.output().token_ids.tolist() == continuation(PROMPT, 1)


def test_messages_of_another_term_are_no_ops(one: Leader) -> None:
    execution = one.execute()
    for stale in [(one.epoch, one.nonce - 1), (one.epoch, one.nonce + 1), (leader(one.epoch.number, "other"), one.nonce)]:
        execution.send(one.step + 1, [(0, 6, 6)], [entry(0, PROMPT, [3], "stale")], under=stale)
        execution.heartbeat(stale)
    output = execution.run(one.step + 1, [(0, 6, 6)], [entry(0, PROMPT, [3], "mine")])
    assert output.token_ids.tolist() == continuation(PROMPT, 1)
    assert [slot.request_id for slot in one.attach().slots] == [b"mine".ljust(16, b".")]


def test_an_attach_has_one_execute_stream(one: Leader) -> None:
    first = one.execute()
    first.run(one.step + 1, [(0, 6, 6)], [entry(0, PROMPT, [3], "a")])
    code, details = reason_of(one.execute().end())
    assert code is grpc.StatusCode.ABORTED and "attach again" in details
    assert first.run(one.step + 2, [(0, 1, 7)]).token_counts.tolist() == [1], "the first goes on"
    first.close()
    assert first.end() is None
    code, _ = reason_of(one.execute().end())
    assert code is grpc.StatusCode.ABORTED, "not even when it is over"


@pytest.mark.parametrize(
    ("epoch", "nonce", "field"),
    [(Epoch(0, b""), 1, "epoch"), (Epoch(5, b"short"), 1, "epoch"), (Epoch(2**63, b"i" * 16), 0, "nonce")],
)
def test_a_bad_attach_is_an_invalid_argument(one: Leader, epoch: Epoch, nonce: int, field: str) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        one.worker.attach(epoch, nonce)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT and refused.value.details().startswith(f"{field}: ")
    assert refused.value.details().count(f"{field}: ") == 1
    assert one.execute().run(one.step + 1).step_id == one.step + 1, "and fences nobody"


@pytest.mark.parametrize("protocol", [0, PROTOCOL_VERSION + 1])
def test_a_scheduler_of_another_version_is_told_so(one: Leader, protocol: int) -> None:
    request = worker_pb2.AttachRequest(epoch=convert.epoch_to_proto(one.epoch), nonce=one.nonce + 1, protocol=protocol)
    with pytest.raises(grpc.RpcError) as refused:
        list(one.worker.stub.Attach(request, timeout=TIMEOUT_S))
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    text = f"the scheduler speaks protocol {protocol}, this worker {PROTOCOL_VERSION}: run the same release of both"
    assert refused.value.details() == text
    (detail,) = rpc_status.from_call(refused.value).details
    assert b"VERSION_SKEW" in detail.value
    assert one.worker.stub.Describe(worker_pb2.DescribeRequest()).protocol == PROTOCOL_VERSION
    assert one.execute().run(one.step + 1).step_id == one.step + 1, "and it fences nobody"


@pytest.mark.parametrize("number", [2**63, 2**64 - 1])
def test_an_epoch_that_nobody_can_have_reached_is_refused(one: Leader, number: int) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        one.worker.attach(leader(number), 1)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "cannot have been reached" in refused.value.details()
    assert one.execute().run(one.step + 1).step_id == one.step + 1


def test_an_attach_says_that_the_worker_lives_while_the_started_batch_runs(one: Leader) -> None:
    execution = one.execute()
    one.worker.gate.arm()
    execution.send(one.step + 1, [(0, 6, 6)], [entry(0, PROMPT, [3], "a")])
    one.worker.gate.wait_started()
    one.nonce += 1
    call = one.worker.attach_call(one.epoch, one.nonce)
    for _ in range(4):
        part = next(call)
        assert (part.nonce, part.WhichOneof("part"), part.heartbeat.nonce) == (one.nonce, "heartbeat", one.nonce)
    one.worker.gate.disarm()
    one.worker.gate.let_go()
    assert report_of(call).last_step == one.step + 1


def read_blocks(worker: WorkerProcess, *block_ids: int, is_host: bool = False) -> list[Any]:
    request = worker_pb2.ReadBlocksRequest(block_ids=block_ids, is_host=is_host)
    return list(worker.stub.ReadBlocks(request, timeout=TIMEOUT_S))


def test_blocks_are_read_as_they_are(one: Leader) -> None:
    """The deterministic model's KV is one 64-bit number a position, in halves, made from the ids up to it."""
    one.execute().run(one.step + 1, [(0, 6, 6), (1, 6, 6)], [entry(0, PROMPT, [41], "a"), entry(1, PROMPT, [42], "b")])
    first, never, second = read_blocks(one.worker, 42, 60, 41)
    assert [block.block_id for block in (first, never, second)] == [42, 60, 41]
    assert first.last_write_step == second.last_write_step == one.step + 1
    kv = [np.frombuffer(block.kv, "<f4").reshape(1, 2, 16, 1, 1) for block in (first, second)]
    assert kv[0].tobytes() == kv[1].tobytes() and np.count_nonzero(kv[0].view(np.uint32)[0, 0]) == 6
    assert never.last_write_step == 0 and not np.frombuffer(never.kv, "<f4").view(np.uint32).any()


def test_a_slot_swapped_out_behind_a_batch_in_flight_is_reported_read_and_brought_back(one: Leader) -> None:
    """The batch that samples has started when the one that swaps its slot out arrives; a takeover then finds the slot swapped out,
    with the token, and its blocks in the host pool."""
    execution, step = one.execute(), one.step
    one.worker.gate.arm()
    execution.send(step + 1, [(0, 6, 6)], [entry(0, PROMPT, [41], "a")])
    one.worker.gate.wait_started()
    execution.send(step + 2, swap_outs=(swap(0, [19], [(41, 19)], "a"),))
    one.worker.gate.disarm()
    one.worker.gate.let_go()
    tokens = [*execution.output().token_ids.tolist(), *execution.output().token_ids.tolist()]
    execution.run(step + 3, [(1, 6, 6)], [entry(1, PROMPT[::-1], [41], "b")])
    (slot,) = [slot for slot in one.attach().slots if slot.slot == 0]
    assert slot.is_swapped and slot.block_table.tolist() == [19] and slot.computed_len == 6
    assert slot.token_ids.tolist() == PROMPT + tokens
    (out,) = read_blocks(one.worker, 19, is_host=True)
    assert (out.block_id, out.last_write_step) == (19, 0)
    output = one.execute().run(one.step + 1, [(0, 1, 7)], swap_ins=(swap(0, [40], [(19, 40)], "a"),))
    assert [*tokens, *output.token_ids.tolist()] == continuation(PROMPT, 2)
    (back,) = read_blocks(one.worker, 40)
    kv, held = (np.frombuffer(block.kv, "<u4").reshape(2, 16)[:, :6].tolist() for block in (back, out))
    assert kv == held and back.last_write_step == one.step + 1


def test_a_swap_that_does_not_fit_is_refused_and_the_worker_lives_on(one: Leader) -> None:
    execution = one.execute()
    execution.run(one.step + 1, [(0, 6, 6)], [entry(0, PROMPT, [3], "a")])
    execution.send(one.step + 2, swap_outs=(swap(0, [20], [(3, 20)], "a"),))
    refused = execution.next("refused")
    assert refused.step_id == one.step + 2 and "swap out of slot 0: a block id outside the pool of 20" in refused.reason
    one.attach()
    assert one.execute().run(one.step + 1, [(0, 1, 7)]).token_ids.tolist() == continuation(PROMPT, 2)[1:]


def test_a_dummy_run_answers_rows_without_tokens(one: Leader) -> None:
    output = one.execute().run(one.step + 1, [(0, 1, 30), (0, 5, 9)], is_dummy_run=True)
    assert output.token_counts.tolist() == [0, 0] and output.row_errors == ()
    assert one.attach().slots == ()


def test_reading_blocks_waits_for_the_started_batch_and_disturbs_no_stream(one: Leader) -> None:
    execution = one.execute()
    one.worker.gate.arm()
    execution.send(one.step + 1, [(0, 6, 6)], [entry(0, PROMPT, [3], "a")])
    one.worker.gate.wait_started()
    execution.send(one.step + 2, [(0, 1, 7)])
    call = one.worker.stub.ReadBlocks(worker_pb2.ReadBlocksRequest(block_ids=[3]), timeout=TIMEOUT_S)
    for _ in range(3):
        one.worker.stub.Describe(worker_pb2.DescribeRequest())  # answered behind it: the visit is in the queue by now
    one.worker.gate.let_go()
    one.worker.gate.wait_started()  # the second batch has started: the visit was between the two
    assert next(call).last_write_step == one.step + 1
    one.worker.gate.disarm()
    one.worker.gate.let_go()
    tokens = [execution.output().token_ids.tolist(), execution.output().token_ids.tolist()]
    assert tokens == [[token] for token in continuation(PROMPT, 2)]


@pytest.mark.parametrize(
    ("block_ids", "problem"),
    [([3, 64], "64 is not below num_blocks, 64"), ([3, 3], "1 of them different"), (range(5000), "5000 ids")],
)
def test_blocks_that_cannot_be_read_are_named(one: Leader, block_ids: list[int], problem: str) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        read_blocks(one.worker, *block_ids)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT and problem in refused.value.details()


def test_host_blocks_that_cannot_be_read_are_named(one: Leader) -> None:
    assert len(read_blocks(one.worker, 0, 19, is_host=True)) == 2
    with pytest.raises(grpc.RpcError) as refused:
        read_blocks(one.worker, 20, is_host=True)
    assert "20 is not below num_host_blocks, 20" in refused.value.details()


def test_a_worker_stopped_and_continued_answers_to_its_present_leader_only(tmp_path: Path) -> None:
    """What it computes late goes to a stream that is fenced, and stays in its slots."""
    with worker_process(tmp_path) as worker:
        first, second = Leader(worker, leader(1)), Leader(worker, leader(2, "two"))
        first.attach()
        execution = first.execute()
        worker.gate.arm()
        execution.send(1, [(0, 6, 6)], [entry(0, PROMPT, [3], "a")])
        worker.gate.wait_started()
        worker.process.send_signal(signal.SIGSTOP)
        second.nonce += 1
        call = worker.attach_call(second.epoch, second.nonce)
        worker.gate.disarm()
        worker.gate.let_go()
        worker.process.send_signal(signal.SIGCONT)
        report = report_of(call)
        assert report.slots[0].token_ids.tolist() == PROMPT + continuation(PROMPT, 1)
        code, details = reason_of(execution.end())
        assert code is grpc.StatusCode.FAILED_PRECONDITION and "older epoch" in details
        second.step = report.last_step
        assert second.execute().run(2, [(0, 1, 7)]).token_ids.tolist() == continuation(PROMPT, 2)[1:]


def test_after_sigterm_a_worker_says_so_and_computes_until_its_slots_are_given_up(tmp_path: Path) -> None:
    with worker_process(tmp_path) as worker:
        only = Leader(worker, leader(1))
        only.attach()
        execution = only.execute()
        execution.run(1, [(0, 6, 6)], [entry(0, PROMPT, [3], "a")])
        codes: list[int] = []
        ending = threading.Thread(target=lambda: codes.append(worker.terminate()))
        ending.start()
        execution.next("leaving")
        assert execution.run(2, [(0, 1, 7)]).token_ids.tolist() == continuation(PROMPT, 2)[1:]
        only.nonce += 1  # the next leader hears of it as well
        only.attach()
        execution = only.execute()
        execution.next("leaving")
        execution.run(3, drops=[SlotDrop(0, b"a".ljust(16, b"."), 1)])
        code, details = reason_of(execution.end())
        assert code is grpc.StatusCode.UNAVAILABLE and "shutting down" in details
        ending.join(TIMEOUT_S)
        assert codes == [0]


def test_a_worker_that_nobody_commands_ends_at_once(tmp_path: Path) -> None:
    with worker_process(tmp_path, drain_grace_s=1000.0) as worker:
        only = Leader(worker, leader(1))
        only.attach()
        execution = only.execute()
        execution.run(1, [(0, 6, 6)], [entry(0, PROMPT, [3], "a")])
        execution.call.cancel()
        assert worker.terminate() == 0


def test_without_grace_sigterm_finishes_the_step_and_exits_cleanly(tmp_path: Path) -> None:
    with worker_process(tmp_path, drain_grace_s=0.0) as worker:
        only = Leader(worker, leader(1))
        only.attach()
        execution = only.execute()
        worker.gate.arm()
        execution.send(1, [(0, 6, 6)], [entry(0, PROMPT, [3], "a")])
        worker.gate.wait_started()
        execution.send(2, [(0, 1, 7)])
        codes: list[int] = []
        ending = threading.Thread(target=lambda: codes.append(worker.terminate()))
        ending.start()
        watch = health_pb2_grpc.HealthStub(worker.channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        execution.next("leaving")
        worker.gate.disarm()
        worker.gate.let_go()
        assert execution.output().token_ids.tolist() == continuation(PROMPT, 1)
        code, details = reason_of(execution.end())
        assert code is grpc.StatusCode.UNAVAILABLE and "shutting down" in details
        ending.join(TIMEOUT_S)
        assert codes == [0]
        assert not (tmp_path / "ready.json").exists()
        watch.cancel()


def test_a_worker_is_not_serving_until_its_model_is_loaded(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    gate.arm()
    socket = f"unix:{tmp_path}/socket"
    script = str(Path(__file__).with_name("gated_worker.py"))
    process = subprocess.Popen([sys.executable, script, str(tmp_path), json.dumps({"listen": socket}), "gate-loading"])
    try:
        gate.wait_started()
        with grpc.insecure_channel(socket) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME), timeout=TIMEOUT_S, wait_for_ready=True)
            assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING, "it lives"
            with pytest.raises(grpc.RpcError) as refused:
                worker_pb2_grpc.WorkerServiceStub(channel).Describe(worker_pb2.DescribeRequest())
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE and "loading" in refused.value.details()
            assert not (tmp_path / "ready.json").exists()
            gate.let_go()
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            watch.cancel()
    finally:
        process.kill()
        process.wait()
        gate.close()


def test_sigterm_while_the_model_loads_ends_at_once(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    gate.arm()
    script = str(Path(__file__).with_name("gated_worker.py"))
    process = subprocess.Popen([sys.executable, script, str(tmp_path), json.dumps({}), "gate-loading"])
    try:
        gate.wait_started()
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0, "the load, which waits for the gate for ever, holds nothing up"
    finally:
        process.kill()
        process.wait()
        gate.close()


def test_sampled_tokens_do_not_depend_on_the_process(one: Leader) -> None:
    """The same seed gives the same token in another process with other neighbours: here the engine's answer, worked out apart."""
    from model_worker.sample_rows import SampleRows
    from model_worker.sampler import Sampler
    from model_worker.sampling_table import SamplingTable
    from tessera.values.sampling import SamplingParams

    params = SamplingParams(seed=77)
    output = one.execute().run(
        one.step + 1,
        [(0, 6, 6), (1, 6, 6)],
        [entry(0, PROMPT, [3], "a", sampling=params), entry(1, PROMPT, [4], "b", sampling=GREEDY)],
    )
    first, second = next_tokens(PROMPT, VOCAB)
    logits = int32([0] * VOCAB).astype("float32").reshape(1, -1)
    logits[0, [second, first]] = [15.0, 16.0]
    table, prompt_len = SamplingTable(1, VOCAB), np.array([len(PROMPT)])
    table.set(0, params)
    row = SampleRows(table, int32([PROMPT]), np.zeros(1, np.int64), prompt_len, prompt_len, np.ones(1, np.bool_))
    assert output.token_ids.tolist() == [*Sampler(()).sample(logits, row).token_ids.tolist(), first]
