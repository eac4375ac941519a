"""The gateway as a process, and a client that nobody here wrote."""

import asyncio
import json
import os
import signal
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import pytest
from gateway_house import (
    MODEL,
    ScriptedScheduler,
    assert_dense,
    max_tokens,
    output,
    read_all,
    reason_and_fields,
    refused,
)
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.gateway import main
from services.gateway.config import GatewayConfig
from services.gateway.servicer import SERVICE_NAME
from services.rpc.access_config import AccessConfig
from services.rpc.channel import open_channel
from tessera.v1 import inference_pb2 as pb
from tessera.v1 import inference_pb2_grpc
from tessera.values.config import ConfigError
from tessera.values.session import Detach, Submit

ROOT = Path(__file__).resolve().parents[3]

PROCESS = """
import json
import sys
from pathlib import Path
from services.gateway.config import GatewayConfig
from services.gateway.main import run
options = {"listen": "127.0.0.1:0", "heartbeat_ms": 20_000, **json.loads(sys.argv[4])}
run(GatewayConfig(scheduler=(sys.argv[1],), model=sys.argv[2], ready_file=Path(sys.argv[3]), **options))
"""


@asynccontextmanager
async def child(*command, **environment):
    """A process; killed at the end if it still runs."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, env=os.environ | environment)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def test_buf_curl_streams_tokens_through_reflection(run_async, house, tokenizer, tmp_path):
    async def scenario():
        ids = tokenizer.encode("Hello from afar 😀", False)
        async with house() as h:
            end = await h.session()
            async with child(
                Path(sys.executable).with_name("buf"),
                *("curl", "--protocol", "grpc", "--http2-prior-knowledge"),
                *("-d", '{"generation": {"text": "Hi", "sampling": {"temperature": 0, "maxTokens": 50}}}'),
                f"http://{h.gateway.address}/tessera.v1.InferenceService/StreamGenerate",
                HOME=str(tmp_path),
            ) as process:
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


def gateway_process(scheduler_address, ready_file, **options):
    """A gateway as a process."""
    arguments = (scheduler_address, MODEL, ready_file, json.dumps(options))
    return child(sys.executable, "-c", PROCESS, *arguments, PYTHONPATH=str(ROOT))


async def logged(process, event):
    """The next log line that tells of `event`."""
    while (line := json.loads(await process.stderr.readline()))["event"] != event:
        pass
    return line


def test_sigterm_lets_running_requests_end_and_exits_0(run_async, model_info, tmp_path):
    async def scenario():
        ready_file = tmp_path / "ready.json"
        async with (
            ScriptedScheduler(model_info) as scheduler,
            gateway_process(scheduler.address, ready_file) as process,
        ):
            address = (await logged(process, "listening"))["address"]
            assert json.loads(ready_file.read_text()) == {"address": address}
            end = await scheduler.session()
            end.ack()
            async with open_channel(address) as channel:
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
                call = stub.StreamGenerate(pb.StreamGenerateRequest(generation=pb.Generation(text="Hi")))
                submit = await end.hear(Submit)
                end.send(output(submit, 0, [504]))
                first = await call.read()
                process.send_signal(signal.SIGTERM)
                await logged(process, "draining")
                end.send(output(submit, 1, [505], max_tokens(2)))
                assert_dense([first, *await read_all(call)])
                assert await process.wait() == 0
            assert end.nothing_heard()
            assert not ready_file.exists()

    run_async(scenario())


def test_sigterm_sends_on_what_still_runs_after_the_grace(run_async, model_info, tmp_path):
    """The client is told to go elsewhere, the scheduler that it will; both before the process ends."""

    async def scenario():
        async with (
            ScriptedScheduler(model_info) as scheduler,
            gateway_process(scheduler.address, tmp_path / "ready.json", drain_grace_s=0.1) as process,
        ):
            address = (await logged(process, "listening"))["address"]
            end = await scheduler.session()
            end.ack()
            async with open_channel(address) as channel:
                call = inference_pb2_grpc.InferenceServiceStub(channel).StreamGenerate(
                    pb.StreamGenerateRequest(generation=pb.Generation(text="Hi"))
                )
                submit = await end.hear(Submit)
                end.send(output(submit, 0, [504]))
                await call.read()
                process.send_signal(signal.SIGTERM)
                error = await refused(call)
                assert (error.code(), reason_and_fields(error)[0]) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
                assert await end.hear(Detach) == Detach(submit.submission.request_id, 0)
                assert await process.wait() == 0
            assert end.nothing_heard()

    run_async(scenario())


def test_a_stopped_gateway_does_not_abort_the_requests_of_clients_that_left_it(run_async, model_info, tmp_path):
    async def scenario():
        async with (
            ScriptedScheduler(model_info) as scheduler,
            gateway_process(scheduler.address, tmp_path / "ready.json", heartbeat_ms=1_000) as process,
        ):
            address = (await logged(process, "listening"))["address"]
            end = await scheduler.session()
            end.ack()
            beating = asyncio.create_task(end.beat(0.2))
            async with open_channel(address) as channel:
                call = inference_pb2_grpc.InferenceServiceStub(channel).StreamGenerate(
                    pb.StreamGenerateRequest(generation=pb.Generation(text="Hi"))
                )
                submit = await end.hear(Submit)
                end.send(output(submit, 0, [504]))
                await call.read()
                process.send_signal(signal.SIGSTOP)
                call.cancel()
                await asyncio.sleep(1.5)  # longer than a heartbeat, shorter than the silence that ends a session
                process.send_signal(signal.SIGCONT)
                assert await end.hear(Detach) == Detach(submit.submission.request_id, 0)
            beating.cancel()

    run_async(scenario())


def test_a_gateway_answers_health_before_there_is_a_scheduler_and_exits_on_sigint(run_async, tmp_path):
    async def scenario():
        async with gateway_process("127.0.0.1:1", tmp_path / "ready.json") as process:
            line = await logged(process, "listening")
            assert (line["role"], line["level"]) == ("gateway", "info")
            async with open_channel(line["address"]) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                alive = await stub.Check(health_pb2.HealthCheckRequest())
                ready = await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
            status = health_pb2.HealthCheckResponse
            assert (alive.status, ready.status) == (status.SERVING, status.NOT_SERVING)
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 0

    run_async(scenario())


def test_requests_still_running_when_the_grace_ends_are_sent_on(run_async, house):
    """Their clients are told to go elsewhere, and the scheduler that they will; it has heard so before the gateway is gone."""

    async def scenario():
        async with house(drain_grace_s=0.05) as h:
            end = await h.session()
            streamed, whole = h.stream(request_id="a"), h.generate(request_id="b")
            submits = [await end.hear(Submit), await end.hear(Submit)]
            end.send(*(output(submit, 0, [504]) for submit in submits))
            await streamed.read()
        for call in (streamed, whole):
            error = await refused(call)
            assert (error.code(), reason_and_fields(error)[0]) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
            assert int(dict(error.trailing_metadata())["grpc-retry-pushback-ms"]) > 0
        detached = {(await end.hear(Detach)) for _ in submits}
        assert detached == {Detach(submit.submission.request_id, 0) for submit in submits}
        assert end.nothing_heard()

    run_async(scenario())


def test_after_the_grace_clients_are_sent_on_in_turn(run_async, house, monkeypatch):
    """All at once they would wait for each other at the gateway that they come to."""
    monkeypatch.setattr(main, "ENDED_AT_ONCE", 2)
    monkeypatch.setattr(main, "ENDING_STEP_S", 0.01)
    left: list[int] = []

    async def scenario():
        async with house() as h:
            end = await h.session()
            session = h.gateway.session
            end_some = session.end_some
            monkeypatch.setattr(session, "end_some", lambda count: left.append(end_some(count)) or left[-1])
            calls = [h.generate(request_id=f"{number}") for number in range(5)]
            submits = [await end.hear(Submit) for _ in calls]
        for call in calls:
            assert (await refused(call)).code() is grpc.StatusCode.UNAVAILABLE
        detached = {(await end.hear(Detach)).request_id for _ in submits}
        assert detached == {submit.submission.request_id for submit in submits}

    run_async(scenario())
    assert left == [3, 1, 0]


def test_a_draining_gateway_takes_nothing_new_and_finishes_what_runs(run_async, house):
    async def scenario():
        async with house(drain_grace_s=60.0) as h, AsyncExitStack() as later:
            end = await h.session()
            running = h.stream()
            submit = await end.hear(Submit)
            later.callback(running.cancel)
            h.gateway.session.drain()
            for call in (
                h.generate(),
                h.stream(resume=pb.Resume(number=1), request_id="x"),
                h.stub.ListModels(pb.ListModelsRequest()),
            ):
                error = await refused(call)
                assert (error.code(), reason_and_fields(error)[0]) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
            end.send(output(submit, 0, [504], max_tokens(1)))
            assert [i for piece in await read_all(running) for i in piece.token_ids] == [504]

    run_async(scenario())


def test_a_request_that_waits_for_a_scheduler_is_refused_as_soon_as_its_gateway_drains(run_async, house):
    async def scenario():
        async with house(scheduler_wait_ms=60_000) as h:
            await h.scheduler.opened()
            call = h.generate()
            await asyncio.sleep(0)
            h.gateway.session.drain()
            error = await refused(call)
            assert (error.code(), reason_and_fields(error)[0]) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")

    run_async(scenario())


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("scheduler", ()),
        ("scheduler", ("nowhere",)),
        ("scheduler", ("a:1", "a:1")),
        ("model", ""),
        ("heartbeat_ms", 0),
        ("scheduler_wait_ms", -1),
        ("detach_grace_ms", -1),
        ("max_concurrent_requests", 0),
        ("drain_grace_s", -1.0),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(option, value):
    with pytest.raises(ConfigError, match=option):
        GatewayConfig(**{"scheduler": ("a:1",), "model": MODEL, option: value})


def test_a_port_without_tokens_is_not_open_to_others_beside_one_that_asks_for_them(tmp_path):
    """The engine's protocol has no word for who calls."""
    asks = {"scheduler": ("a:1",), "model": MODEL, "access": AccessConfig(tokens=tmp_path / "tokens")}
    with pytest.raises(ConfigError, match=r"engine_listen 0\.0\.0\.0:50060 would answer everybody"):
        GatewayConfig(**asks, engine_listen="0.0.0.0:50060")
    for local in ("127.0.0.1:50060", "unix:/run/engine"):
        assert GatewayConfig(**asks, engine_listen=local).engine_listen == local
    assert GatewayConfig(scheduler=("a:1",), model=MODEL, engine_listen="0.0.0.0:50060")
