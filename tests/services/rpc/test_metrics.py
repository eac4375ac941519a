"""/metrics over real HTTP: calls by method and code, and what the event loop is asked for."""

import asyncio
import threading
from contextlib import asynccontextmanager
from urllib.request import urlopen

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from services.rpc import errors
from services.rpc.bind_error import BindError
from services.rpc.channel import open_channel
from services.rpc.metric_families import Families
from services.rpc.metrics_server import MetricsServer
from services.rpc.server import RpcServer, ServerConfig
from tessera.v1 import inference_pb2, inference_pb2_grpc

NAME = "tessera.v1.InferenceService"


class Calls(inference_pb2_grpc.InferenceServiceServicer):
    """Says nothing, refuses, fails, streams and hangs."""

    async def GetModel(self, request, context):
        if request.model == "gone":
            raise errors.NotFound("gone", reason="GONE")
        if request.model == "full":
            raise errors.Overloaded("full", reason="OVERLOADED", retry_after_ms=1)
        if request.model == "bug":
            raise KeyError("secret")
        if request.model == "own":
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        return inference_pb2.GetModelResponse()

    async def StreamGenerate(self, request, context):
        yield inference_pb2.StreamGenerateResponse(text="first")
        await asyncio.Event().wait()


@asynccontextmanager
async def serving():
    metrics = MetricsServer("127.0.0.1:0")
    server = RpcServer(ServerConfig("127.0.0.1:0"), metrics)
    server.add(inference_pb2_grpc.add_InferenceServiceServicer_to_server, Calls(), NAME)
    address = await server.start()
    try:
        async with open_channel(address) as channel:
            yield metrics, channel
    finally:
        await server.stop(0)


async def scrape(metrics):
    def read():
        with urlopen(f"http://{metrics.address}/metrics", timeout=5) as answer:
            assert answer.headers["content-type"].startswith("text/plain")
            return answer.read().decode()

    text = await asyncio.to_thread(read)
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def value(samples, name, **labels):
    found = [sample.value for sample in samples if sample.name == name and labels.items() <= sample.labels.items()]
    return sum(found)


def test_calls_are_counted_by_method_and_code(run_async):
    async def scenario():
        async with serving() as (metrics, channel):
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            await stub.GetModel(inference_pb2.GetModelRequest())
            for model in ("gone", "bug", "own"):
                with pytest.raises(grpc.aio.AioRpcError):
                    await stub.GetModel(inference_pb2.GetModelRequest(model=model))
            stream = stub.StreamGenerate(inference_pb2.StreamGenerateRequest())
            assert (await stream.read()).text == "first"
            before = await scrape(metrics)
            stream.cancel()
            samples = before
            while not value(samples, "grpc_server_handled_total", grpc_method="StreamGenerate"):
                samples = await scrape(metrics)
        assert value(before, "grpc_server_started_total", grpc_method="StreamGenerate", grpc_type="server_stream") == 1
        assert value(before, "grpc_server_handled_total", grpc_method="StreamGenerate") == 0
        assert value(samples, "grpc_server_started_total", grpc_service=NAME, grpc_method="GetModel", grpc_type="unary") == 4
        by_code = {
            sample.labels["grpc_code"]: sample.value
            for sample in samples
            if sample.name == "grpc_server_handled_total" and sample.labels["grpc_method"] == "GetModel"
        }
        assert by_code == {"OK": 1, "NotFound": 1, "Internal": 1, "ResourceExhausted": 1}
        assert value(samples, "grpc_server_handled_total", grpc_method="StreamGenerate", grpc_code="Canceled") == 1
        assert value(samples, "grpc_server_handling_seconds_count", grpc_method="GetModel") == 4

    run_async(scenario())


def test_refusals_are_counted_by_reason(run_async):
    async def scenario():
        async with serving() as (metrics, channel):
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            for model in ("full", "full", "gone", "bug", "own", ""):
                try:
                    await stub.GetModel(inference_pb2.GetModelRequest(model=model))
                except grpc.aio.AioRpcError:
                    pass
            samples = await scrape(metrics)
        refused = {
            (one.labels["grpc_code"], one.labels["reason"]): one.value
            for one in samples
            if one.name == "tessera:refused_calls_total"
        }
        assert refused == {("ResourceExhausted", "OVERLOADED"): 2, ("NotFound", "GONE"): 1}

    run_async(scenario())


def test_a_reading_is_made_on_the_event_loop(run_async):
    async def scenario():
        threads = []

        def reading():
            threads.append(threading.current_thread())
            families = Families(model_name="m")
            families.gauge("tessera:some", "Some.", 3, colour="red")
            families.histogram("tessera:times", "Times.", (0.1, 1), (2, 0, 1), 5.25)
            return families.metrics

        async with serving() as (metrics, _):
            metrics.show(reading)
            samples = await scrape(metrics)
        assert threads == [threading.current_thread()]
        assert value(samples, "tessera:some", model_name="m", colour="red") == 3
        buckets = {sample.labels["le"]: sample.value for sample in samples if sample.name == "tessera:times_bucket"}
        assert buckets == {"0.1": 2, "1.0": 2, "+Inf": 3}
        assert value(samples, "tessera:times_count") == 3 and value(samples, "tessera:times_sum") == 5.25
        assert value(samples, "process_resident_memory_bytes") > 1 << 20

    run_async(scenario())


def test_nothing_listens_where_the_server_has_stopped(run_async):
    async def scenario():
        async with serving() as (metrics, channel):
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        with pytest.raises(OSError):
            await scrape(metrics)

    run_async(scenario())


@pytest.mark.parametrize("listen", ["127.0.0.1", "127.0.0.1:http", "127.0.0.1:65536", "192.0.2.1:0"])
def test_an_address_that_cannot_be_served_says_so(listen, run_async):
    async def scenario():
        with pytest.raises(BindError, match="cannot serve metrics on"):
            MetricsServer(listen).start()

    run_async(scenario())
