"""Requests that end before their answers do are gone from the worker too, while others run on."""

from pathlib import Path

import grpc
import pytest
from process_stack import MODEL, Stack, StackOptions
from stream_reader import Reader, wait_until
from test_metrics_scrape import METRICS, value

from services.worker.convert import epoch_to_proto, report_from_proto
from tessera.client import Client, DeadlineExceeded
from tessera.v1 import inference_pb2 as pb
from tessera.v1.inference_pb2_grpc import InferenceServiceStub
from tessera.values.identity import Epoch
from tessera.values.protocol import PROTOCOL_VERSION
from tessera.values.report import WorkerReport
from tessera.worker.v1 import worker_pb2
from tessera.worker.v1.worker_pb2_grpc import WorkerServiceStub

ENDLESS = {"temperature": 0.0, "max_tokens": 8000, "ignore_eos": True}
"""At 20 ms a token, minutes."""

BATCHES = 5
"""A drop goes out with the next batch; at most two are in flight."""


def report_of(stack: Stack) -> WorkerReport:
    """What the worker holds, as it tells a next leader."""
    request = worker_pb2.AttachRequest(epoch=epoch_to_proto(Epoch(100, b"t" * 16)), nonce=1, protocol=PROTOCOL_VERSION)
    with grpc.insecure_channel(stack.worker.address) as channel:
        return report_from_proto(list(WorkerServiceStub(channel).Attach(request, timeout=30)))


def ask(channel: grpc.Channel, text: str, timeout_s: float | None = None) -> grpc.Call:
    """A stream without an end of its own."""
    sampling = pb.Sampling(max_tokens=8000, ignore_eos=True)
    request = pb.StreamGenerateRequest(generation=pb.Generation(text=text, sampling=sampling))
    return InferenceServiceStub(channel).StreamGenerate(request, timeout=timeout_s)


def test_what_is_cancelled_or_too_late_leaves_its_slot(tmp_path: Path) -> None:
    program = "tests.benchmarks.load.paced_worker"
    small = ["--kv-cache-bytes", str(4 << 20)]  # some half a million positions
    options = StackOptions(MODEL, f"deterministic:{MODEL}", METRICS, small, worker_program=program)
    with Stack(tmp_path, options) as stack, Client(stack.address) as client, grpc.insecure_channel(stack.address) as channel:
        staying = Reader(client, "This one stays", **ENDLESS)
        limited = Reader(client, "This one has a limit", **ENDLESS, max_total_ms=1000)
        cancelled = ask(channel, "This one's client goes away")
        late = ask(channel, "This one's call has a deadline", timeout_s=1.0)
        staying.wait_tokens(1)
        next(cancelled)
        cancelled.cancel()
        with pytest.raises(grpc.RpcError) as caught:
            list(late)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        with pytest.raises(DeadlineExceeded):
            limited.result()
        wait_until(lambda: value(stack.scheduler, "vllm:num_requests_running") == 1, "three have ended")
        staying.wait_tokens(len(staying.token_ids) + BATCHES)
        stack.scheduler.kill()
        [slot] = report_of(stack).slots
        output = slot.token_ids[slot.prompt_len :].tolist()
        assert output[: len(staying.token_ids)] == staying.token_ids
