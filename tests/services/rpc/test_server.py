"""The bootstrap against real channels: errors become statuses, health and reflection answer, draining is graceful."""

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import weakref
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_status import rpc_status

from services.rpc import errors
from services.rpc.channel import open_channel
from services.rpc.server import BindError, RpcServer, ServerConfig
from services.rpc.status import INTERNAL_TEXT, status_of
from tessera.v1 import inference_pb2, inference_pb2_grpc

NAME = "tessera.v1.InferenceService"
BURST = 2500
"""Calls at once, of which gRPC by itself would cancel some hundreds."""

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class Scripted(inference_pb2_grpc.InferenceServiceServicer):
    """Every call does what the test put into `act`."""

    def __init__(self):
        self.act = None
        self.ended = asyncio.Event()

    async def GetModel(self, request, context):
        return await self.act(context)

    async def StreamGenerate(self, request, context):
        try:
            await context.write(inference_pb2.StreamGenerateResponse(text="first"))
            await self.act(context)
        finally:
            self.ended.set()


class Generators(inference_pb2_grpc.InferenceServiceServicer):
    """The same stream as an asynchronous generator."""

    def __init__(self):
        self.closed = asyncio.Event()

    async def StreamGenerate(self, request, context):
        try:
            yield inference_pb2.StreamGenerateResponse(text="first")
            if request.generation.model == "bug":
                raise KeyError("secret")
            await asyncio.Event().wait()
        finally:
            self.closed.set()


@asynccontextmanager
async def serving(servicer, **config):
    server = RpcServer(ServerConfig(listen="127.0.0.1:0", **config))
    server.add(inference_pb2_grpc.add_InferenceServiceServicer_to_server, servicer, NAME, ready=False)
    address = await server.start()
    try:
        async with open_channel(address) as channel:
            yield server, channel
    finally:
        await server.stop(0)


def raising(error):
    async def act(context):
        raise error

    return act


async def refusal(channel):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await inference_pb2_grpc.InferenceServiceStub(channel).GetModel(inference_pb2.GetModelRequest())
    return caught.value


def details(error):
    status = rpc_status.from_call(error)
    found = {}
    for packed in status.details:
        for kind in (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo):
            if packed.Is(kind.DESCRIPTOR):
                found[kind.__name__] = kind.FromString(packed.value)
    return found


PLAIN = [
    (errors.NotFound, grpc.StatusCode.NOT_FOUND),
    (errors.AlreadyExists, grpc.StatusCode.ALREADY_EXISTS),
    (errors.FailedPrecondition, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.Aborted, grpc.StatusCode.ABORTED),
    (errors.Internal, grpc.StatusCode.INTERNAL),
]


@pytest.mark.parametrize(("kind", "code"), PLAIN)
def test_an_error_becomes_its_status(run_async, kind, code):
    async def scenario():
        servicer = Scripted()
        async with serving(servicer) as (_server, channel):
            servicer.act = raising(kind("it is 7 of 5", reason="TOO_MANY", metadata={"limit": "5"}))
            error = await refusal(channel)
            assert (error.code(), error.details()) == (code, "it is 7 of 5")
            info = details(error)["ErrorInfo"]
            assert (info.reason, info.domain, dict(info.metadata)) == ("TOO_MANY", "tessera", {"limit": "5"})

    run_async(scenario())


def test_a_refused_field_is_named_in_the_details(run_async):
    async def scenario():
        servicer = Scripted()
        async with serving(servicer) as (_server, channel):
            violations = (errors.FieldViolation("a.b", "is 3"), errors.FieldViolation("c", "is missing"))
            servicer.act = raising(errors.InvalidArgument(violations))
            error = await refusal(channel)
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert error.details() == "a.b: is 3; c: is missing"
            found = details(error)["BadRequest"].field_violations
            assert [(item.field, item.description) for item in found] == [("a.b", "is 3"), ("c", "is missing")]

    run_async(scenario())


def test_a_retryable_error_says_when(run_async):
    async def scenario():
        servicer = Scripted()
        async with serving(servicer) as (_server, channel):
            servicer.act = raising(errors.Overloaded("full", reason="QUEUE_FULL", retry_after_ms=1500))
            error = await refusal(channel)
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert details(error)["RetryInfo"].retry_delay.ToMilliseconds() == 1500
            assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "1500"
            servicer.act = raising(errors.Unavailable("gone", reason="NO_SCHEDULER", retry_after_ms=0))
            error = await refusal(channel)
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert "RetryInfo" not in details(error)

    run_async(scenario())


@pytest.mark.parametrize("servicer_kind", [Scripted, Generators])
def test_a_request_that_cannot_be_decoded_is_refused(run_async, servicer_kind):
    async def scenario():
        async with serving(servicer_kind()) as (_server, channel):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_stream(f"/{NAME}/StreamGenerate")(b"\xff\xff").read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "request: cannot be decoded" in caught.value.details()
            assert "StreamGenerateRequest" in caught.value.details()

    run_async(scenario())


def test_a_bug_is_internal_and_shows_nothing(run_async):
    async def scenario():
        servicer = Scripted()
        async with serving(servicer) as (_server, channel):
            servicer.act = raising(KeyError("secret"))
            error = await refusal(channel)
            assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, INTERNAL_TEXT)

    run_async(scenario())


@pytest.mark.parametrize("servicer_kind", ["coroutine", "generator"])
def test_a_bug_in_a_stream_ends_it_with_internal(run_async, servicer_kind):
    async def scenario():
        servicer = Scripted() if servicer_kind == "coroutine" else Generators()
        if servicer_kind == "coroutine":
            servicer.act = raising(KeyError("secret"))
        async with serving(servicer) as (_server, channel):
            request = inference_pb2.StreamGenerateRequest(generation=inference_pb2.Generation(model="bug"))
            call = inference_pb2_grpc.InferenceServiceStub(channel).StreamGenerate(request)
            assert (await call.read()).text == "first"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INTERNAL, INTERNAL_TEXT)

    run_async(scenario())


def test_a_cancel_reaches_coroutine_and_generator(run_async):
    async def scenario():
        async def wait(context):
            await asyncio.Event().wait()

        scripted, generators = Scripted(), Generators()
        scripted.act = wait
        for servicer, ended in ((scripted, scripted.ended), (generators, generators.closed)):
            async with serving(servicer) as (_server, channel):
                call = inference_pb2_grpc.InferenceServiceStub(channel).StreamGenerate(inference_pb2.StreamGenerateRequest())
                await call.read()
                call.cancel()
                await asyncio.wait_for(ended.wait(), 5)

    run_async(scenario())


def test_details_stay_below_the_metadata_limit(run_async):
    async def scenario():
        servicer = Scripted()
        async with serving(servicer) as (_server, channel):
            violations = tuple(errors.FieldViolation(f"field[{i}]", "ä" * 1000) for i in range(100))
            servicer.act = raising(errors.InvalidArgument(violations))
            error = await refusal(channel)
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert len(details(error)["BadRequest"].field_violations) >= 2

    run_async(scenario())


def test_every_error_has_a_code():
    def leaves(kind):
        below = kind.__subclasses__()
        return [leaf for child in below for leaf in leaves(child)] if below else [kind]

    for kind in leaves(errors.ServiceError):
        error = kind.__new__(kind)
        error.message, error.reason, error.metadata, error.retry_after_ms, error.violations = "text", "R", {}, 0, ()
        error.subject = ""
        assert isinstance(status_of(error)[0], grpc.StatusCode)


def test_health_follows_readiness_and_watches_see_every_change(run_async):
    async def scenario():
        async with serving(Scripted()) as (server, channel):
            stub = health_pb2_grpc.HealthStub(channel)
            assert (await stub.Check(health_pb2.HealthCheckRequest())).status == SERVING
            assert (await stub.Check(health_pb2.HealthCheckRequest(service=NAME))).status == NOT_SERVING
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Check(health_pb2.HealthCheckRequest(service="nobody"))
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            watches = [stub.Watch(health_pb2.HealthCheckRequest(service=NAME)) for _ in range(2)]
            assert [(await watch.read()).status for watch in watches] == [NOT_SERVING] * 2
            server.health.set_ready(NAME, True)
            assert [(await watch.read()).status for watch in watches] == [SERVING] * 2
            watches[0].cancel()
            server.health.drain()
            server.health.set_ready(NAME, True)  # too late
            assert (await watches[1].read()).status == NOT_SERVING
            assert await watches[1].read() is grpc.aio.EOF

    run_async(scenario())


def test_a_refused_call_leaves_nothing_for_the_collector(run_async):
    async def scenario():
        servicer = Scripted()
        async with serving(servicer) as (_server, channel):
            raised = []

            async def refuse(context):
                error = errors.Overloaded("full", reason="FULL", retry_after_ms=10)
                raised.append(weakref.ref(error))
                raise error

            servicer.act = refuse
            gc.disable()
            try:
                await refusal(channel)
                await refusal(channel)  # the first is over, on the server's side too
            finally:
                gc.enable()
            assert raised[0]() is None

    run_async(scenario())


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_lists_and_describes_the_services(run_async, version):
    async def scenario():
        async with serving(Scripted()) as (_server, channel):
            call = channel.stream_stream(
                f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
                reflection_pb2.ServerReflectionRequest.SerializeToString,
                reflection_pb2.ServerReflectionResponse.FromString,
            )()
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            names = {item.name for item in (await call.read()).list_services_response.service}
            assert {NAME, "grpc.health.v1.Health"} <= names
            await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=NAME))
            assert (await call.read()).file_descriptor_response.file_descriptor_proto
            call.cancel()

    run_async(scenario())


def test_the_receive_limit_is_configurable(run_async):
    async def scenario():
        async def answer(context):
            return inference_pb2.GetModelResponse()

        servicer = Scripted()
        servicer.act = answer
        for limit, fits in ((1 << 20, False), (16 << 20, True)):
            async with serving(servicer, receive_bytes_max=limit) as (_server, channel):
                call = inference_pb2_grpc.InferenceServiceStub(channel).GetModel(
                    inference_pb2.GetModelRequest(model="x" * (5 << 20))
                )
                if fits:
                    await call
                else:
                    assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    run_async(scenario())


def test_a_burst_is_refused_by_the_service_and_not_by_grpc(run_async):
    """On one connection, and all before the server's loop looks at the second of them."""

    async def scenario():
        servicer = Scripted()
        servicer.act = raising(errors.Overloaded("full", reason="OVERLOADED", retry_after_ms=1000))
        async with serving(servicer) as (_server, channel):
            await refusal(channel)  # it is connected
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            calls = [stub.GetModel(inference_pb2.GetModelRequest()) for _ in range(BURST)]
            codes = Counter([await call.code() for call in calls])
            assert codes == {grpc.StatusCode.RESOURCE_EXHAUSTED: BURST}

    run_async(scenario())


@pytest.mark.parametrize(("calls_max", "pending_max"), [(0, 16_384), (4096, 16_384), (10_000, 40_000), (1 << 40, 2**31 - 1)])
def test_more_calls_may_wait_than_a_service_lets_run(calls_max, pending_max):
    options = dict(ServerConfig("127.0.0.1:0", calls_max=calls_max).options())
    assert options["grpc.server.max_pending_requests"] == pending_max
    assert options["grpc.server.max_pending_requests_hard_limit"] == pending_max


def test_a_taken_port_is_named(run_async):
    async def scenario():
        first = RpcServer(ServerConfig(listen="127.0.0.1:0"))
        address = await first.start()
        with pytest.raises(BindError, match=address):
            await RpcServer(ServerConfig(listen=address)).start()
        await first.stop(0)

    run_async(scenario())


@pytest.mark.parametrize("listen", ["127.0.0.1:99999", "127.0.0.1", "127.0.0.1:http"])
def test_a_port_that_cannot_be_is_refused(run_async, listen):
    async def scenario():
        with pytest.raises(BindError, match="a port from 0 to 65535"):
            await RpcServer(ServerConfig(listen=listen)).start()

    run_async(scenario())


def test_a_ready_file_that_cannot_be_written_is_named(run_async, tmp_path):
    async def scenario():
        server = RpcServer(ServerConfig(listen="127.0.0.1:0", ready_file=tmp_path / "nowhere" / "ready.json"))
        with pytest.raises(BindError, match=r"nowhere/ready\.json: No such file"):
            await server.start()
        await server.stop(0)

    run_async(scenario())


def test_a_unix_socket_and_the_ready_file(run_async, tmp_path):
    async def scenario():
        ready_file = tmp_path / "ready.json"
        server = RpcServer(ServerConfig(listen=f"unix:{tmp_path}/s.sock", ready_file=ready_file))
        address = await server.start()
        assert json.loads(ready_file.read_text()) == {"address": address}
        async with open_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            assert (await stub.Check(health_pb2.HealthCheckRequest())).status == SERVING
        await server.stop(0)
        assert not ready_file.exists()

    run_async(scenario())


def test_a_graceful_stop_lets_running_streams_end(run_async):
    async def scenario():
        more = asyncio.Event()

        async def rest(context):
            await more.wait()
            await context.write(inference_pb2.StreamGenerateResponse(text="second"))

        servicer = Scripted()
        servicer.act = rest
        async with serving(servicer) as (server, channel):
            call = inference_pb2_grpc.InferenceServiceStub(channel).StreamGenerate(inference_pb2.StreamGenerateRequest())
            assert (await call.read()).text == "first"
            stopping = asyncio.create_task(server.stop(30))
            more.set()
            assert (await call.read()).text == "second"
            assert await call.read() is grpc.aio.EOF
            await stopping

    run_async(scenario())


ROLE = """
import asyncio, sys
from pathlib import Path
from services.rpc.logs import configure_logs
from services.rpc.server import RpcServer, ServerConfig, stop_signal
async def main():
    configure_logs("role")
    server = RpcServer(ServerConfig(listen="127.0.0.1:0", ready_file=Path(sys.argv[1])))
    stop = stop_signal()
    await server.start()
    await stop
    await server.stop(1)
asyncio.run(main())
"""


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_exits_0(tmp_path, which):
    ready_file = tmp_path / "ready.json"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    process = subprocess.Popen([sys.executable, "-c", ROLE, ready_file], env=environment, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if json.loads(line)["event"] == "listening":
            break
    assert ready_file.exists()
    process.send_signal(which)
    log = [json.loads(line) for line in process.stderr]
    assert process.wait(10) == 0
    assert [entry["event"] for entry in log] == ["draining", "stopped"]
    assert all(entry["role"] == "role" and entry["level"] == "info" for entry in log)
    assert not ready_file.exists()
