"""A span for every call: whose child it is, whether it is sampled, what it says; and that a process which does not trace pays nothing."""

import asyncio
import subprocess
import sys
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.trace import SpanKind, StatusCode

from services.rpc import errors, tracing
from services.rpc.call_span import child_span, is_traced, tell_span, trace_context
from services.rpc.channel import open_channel
from services.rpc.server import RpcServer, ServerConfig
from services.rpc.tracing import check_otlp_endpoint, check_sample_ratio, start_tracing
from tessera.v1 import inference_pb2, inference_pb2_grpc
from tessera.values.config import ConfigError
from tests.recorded_spans import PARENT_ID, SAMPLED, TRACE_ID, UNSAMPLED, RecordedSpans, attributes, id_of, parent_of, trace_of

NAME = "tessera.v1.InferenceService"


class Calls(inference_pb2_grpc.InferenceServiceServicer):
    """Answers with its trace context, refuses, fails, streams and hangs."""

    async def Detokenize(self, request, context):
        tell_span({"told": 7})
        with child_span("part"):
            pass
        return inference_pb2.DetokenizeResponse(text=trace_context() if is_traced() else "not traced")

    async def GetModel(self, request, context):
        if request.model == "gone":
            raise errors.NotFound("gone", reason="GONE")
        raise KeyError("secret")

    async def StreamGenerate(self, request, context):
        yield inference_pb2.StreamGenerateResponse(text=trace_context())
        await asyncio.Event().wait()


@asynccontextmanager
async def serving(spans):
    server = RpcServer(ServerConfig("127.0.0.1:0"), tracing=spans.tracing)
    server.add(inference_pb2_grpc.add_InferenceServiceServicer_to_server, Calls(), NAME)
    address = await server.start()
    try:
        async with open_channel(address) as channel:
            yield channel
    finally:
        await server.stop(0)


async def told_context(channel, *metadata):
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    return (await stub.Detokenize(inference_pb2.DetokenizeRequest(), metadata=metadata)).text


def test_a_call_is_a_span_under_that_of_its_client(run_async):
    async def scenario():
        spans = RecordedSpans()
        async with serving(spans) as channel:
            told = await told_context(channel, ("traceparent", SAMPLED))
        span, part = spans.one(f"{NAME}/Detokenize"), spans.one("part")
        assert span.kind is SpanKind.SERVER and span.status.status_code is StatusCode.UNSET
        assert (trace_of(span), parent_of(span)) == (TRACE_ID, PARENT_ID)
        assert (trace_of(part), parent_of(part)) == (TRACE_ID, id_of(span))
        assert told == f"00-{TRACE_ID}-{id_of(span)}-01", "what other processes are told"
        assert attributes(span) == {
            "rpc.system": "grpc",
            "rpc.service": NAME,
            "rpc.method": "Detokenize",
            "rpc.grpc.status_code": 0,
            "told": 7,
        }

    run_async(scenario())


@pytest.mark.parametrize(
    ("ratio", "metadata", "is_sampled"),
    [
        (1.0, (), True),
        (0.0, (), False),
        (0.0, (("traceparent", SAMPLED),), True),
        (1.0, (("traceparent", UNSAMPLED),), False),
        (1.0, (("traceparent", "nonsense"),), True),
        (0.0, (("traceparent", "nonsense"), ("tracestate", "=,=")), False),
    ],
)
def test_the_client_decides_whether_it_is_traced_else_the_ratio(ratio, metadata, is_sampled, run_async):
    async def scenario():
        spans = RecordedSpans(ratio)
        async with serving(spans) as channel:
            told = await told_context(channel, *metadata)
        assert (told != "not traced") == is_sampled == bool(spans.ended)

    run_async(scenario())


def test_what_ends_a_call_is_told(run_async):
    async def scenario():
        spans = RecordedSpans()
        async with serving(spans) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            for model in ("gone", "bug"):
                with pytest.raises(grpc.aio.AioRpcError):
                    await stub.GetModel(inference_pb2.GetModelRequest(model=model))
            stream = stub.StreamGenerate(inference_pb2.StreamGenerateRequest())
            assert (await stream.read()).text.startswith("00-")
            stream.cancel()
            while len(spans.ended) < 3:  # noqa: ASYNC110 - a span says nothing when it ends
                await asyncio.sleep(0.01)
        ends = [(span.attributes["rpc.grpc.status_code"], span.status.status_code) for span in spans.ended]
        assert ends == [
            (grpc.StatusCode.NOT_FOUND.value[0], StatusCode.UNSET),
            (grpc.StatusCode.INTERNAL.value[0], StatusCode.ERROR),
            (grpc.StatusCode.CANCELLED.value[0], StatusCode.UNSET),
        ]
        assert "secret" not in str([span.to_json() for span in spans.ended])

    run_async(scenario())


def test_health_is_not_traced(run_async):
    async def scenario():
        spans = RecordedSpans()
        async with serving(spans) as channel:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert not spans.ended

    run_async(scenario())


@pytest.mark.parametrize("endpoint", ["collector:4317", "http://", "grpc://collector:4317"])
def test_an_endpoint_says_how_it_is_spoken_to(endpoint):
    with pytest.raises(ConfigError, match="otlp_endpoint must be http://HOST:PORT, or https://HOST:PORT"):
        check_otlp_endpoint(endpoint)


@pytest.mark.parametrize("ratio", [-0.1, 1.5, float("nan")])
def test_a_ratio_is_a_part(ratio):
    with pytest.raises(ConfigError, match="trace_sample_ratio must be from 0 to 1"):
        check_sample_ratio(ratio)


@pytest.mark.parametrize("lacks", tracing.PACKAGES)
def test_without_the_packages_it_says_what_to_install(lacks, monkeypatch):
    def find_spec(name):
        if name == lacks and name == tracing.PACKAGES[0]:
            raise ModuleNotFoundError(name)
        return None if name == lacks else object()

    monkeypatch.setattr(tracing.importlib.util, "find_spec", find_spec)
    with pytest.raises(ConfigError, match=r"run `pip install 'tessera-server\[tracing\]'`"):
        start_tracing("gateway", "http://127.0.0.1:4317")


def test_a_process_that_does_not_trace_imports_nothing_of_it():
    """Of every role's whole code. redis takes a part of the SDK by itself where that is installed, for metrics of its own."""
    code = """
import sys
import services.gateway.main, services.scheduler.main, services.worker.main
from services.rpc.tracing import start_tracing
assert start_tracing("gateway", "") is None
print([name for name in sys.modules if name.startswith(("opentelemetry.sdk.trace", "opentelemetry.exporter", "services.rpc.spans"))])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr
