"""The gateway as a process, and a client that nobody here wrote."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from gateway_house import MODEL, ScriptedScheduler, assert_dense, max_tokens, output, read_all

from services.gateway.config import GatewayConfig
from services.rpc.channel import open_channel
from tessera.v1 import inference_pb2 as pb
from tessera.v1 import inference_pb2_grpc
from tessera.values.config import ConfigError
from tessera.values.session import Abort, Submit

ROOT = Path(__file__).resolve().parents[3]

PROCESS = """
import sys
from pathlib import Path
from services.gateway.config import GatewayConfig
from services.gateway.main import run
config = GatewayConfig(scheduler=sys.argv[1], model=sys.argv[2], listen="127.0.0.1:0", ready_file=Path(sys.argv[3]))
run(config)
"""


def test_buf_curl_streams_tokens_through_reflection(run_async, house, tokenizer, tmp_path):
    async def scenario():
        ids = tokenizer.encode("Hello from afar 😀", False)
        async with house() as h:
            end = await h.session()
            process = await asyncio.create_subprocess_exec(
                Path(sys.executable).with_name("buf"),
                *("curl", "--protocol", "grpc", "--http2-prior-knowledge"),
                *("-d", '{"generation": {"text": "Hi", "sampling": {"temperature": 0, "maxTokens": 50}}}'),
                f"http://{h.gateway.address}/tessera.v1.InferenceService/StreamGenerate",
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=os.environ | {"HOME": str(tmp_path)},
            )
            submit = await end.hear(Submit)
            for i in range(len(ids)):
                end.send(output(submit, i, [ids[i]], max_tokens(len(ids)) if i + 1 == len(ids) else None))
            stdout, stderr = await process.communicate()
            assert process.returncode == 0, stderr
            decoder, text, pieces = json.JSONDecoder(), stdout.decode().strip(), []
            while text:
                piece, end_at = decoder.raw_decode(text)
                pieces.append(piece)
                text = text[end_at:].lstrip()
            assert "".join(piece.get("text", "") for piece in pieces) == "Hello from afar 😀"
            assert [i for piece in pieces for i in piece.get("tokenIds", [])] == ids
            assert pieces[-1]["finish"]["reason"] == "FINISH_REASON_LENGTH"

    run_async(scenario())


async def started(process, ready_file):
    """The address in the ready file, once the log says that it is there."""
    while json.loads(await process.stderr.readline())["event"] != "listening":
        pass
    return json.loads(ready_file.read_text())["address"]


def test_sigterm_lets_running_requests_end_and_exits_0(run_async, model_info, tmp_path):
    async def scenario():
        scheduler = ScriptedScheduler(model_info)
        await scheduler.start()
        ready_file = tmp_path / "ready.json"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", PROCESS, scheduler.address, MODEL, ready_file),
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        address = await started(process, ready_file)
        end = await scheduler.session()
        end.ack()
        async with open_channel(address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            call = stub.StreamGenerate(pb.StreamGenerateRequest(generation=pb.Generation(text="Hi")))
            submit = await end.hear(Submit)
            end.send(output(submit, 0, [504]))
            first = await call.read()
            process.send_signal(signal.SIGTERM)
            while json.loads(await process.stderr.readline())["event"] != "draining":
                pass
            end.send(output(submit, 1, [505], max_tokens(2)))
            pieces = [first, *await read_all(call)]
            assert_dense(pieces)
            assert await process.wait() == 0
        assert end.nothing_heard()
        await scheduler.stop()

    run_async(scenario())


def test_requests_still_running_when_the_grace_ends_are_aborted(run_async, house):
    async def scenario():
        async with house(drain_grace_s=0.05) as h:
            end = await h.session()
            call = h.stream()
            submit = await end.hear(Submit)
        assert (await end.hear(Abort)).request_id == submit.submission.request_id
        assert call.done()

    run_async(scenario())


def test_a_gateway_answers_health_before_there_is_a_scheduler_and_exits_on_sigint(tmp_path):
    """And its log says what it waits for in JSON, with its role."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROCESS, "127.0.0.1:1", MODEL, tmp_path / "ready.json"],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    line = json.loads(process.stderr.readline())
    assert (line["event"], line["role"]) == ("listening", "gateway")
    process.send_signal(signal.SIGINT)
    process.stderr.read()
    assert process.wait(20) == 0


@pytest.mark.parametrize(
    ("option", "value"),
    [("scheduler", ""), ("model", ""), ("heartbeat_ms", 0), ("scheduler_wait_ms", -1), ("drain_grace_s", -1.0)],
)
def test_a_configuration_that_cannot_work_is_refused(option, value):
    with pytest.raises(ConfigError, match=option):
        GatewayConfig(**{"scheduler": "a:1", "model": MODEL, option: value})
