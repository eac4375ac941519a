"""A gateway in this process, against a scheduler whose every word the test says."""

import asyncio
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from services.gateway.main import Gateway
from services.gateway.servicer import SERVICE_NAME
from services.rpc.errors import ServiceError
from services.rpc.server import RpcServer, ServerConfig
from services.scheduler.convert import request_from_proto, response_to_proto
from tessera.scheduler.v1 import session_pb2
from tessera.v1 import inference_pb2 as pb
from tessera.v1 import inference_pb2_grpc
from tessera.values.finish import Finish, FinishReason
from tessera.values.identity import NO_EPOCH, Epoch
from tessera.values.model import ModelInfo
from tessera.values.request import RequestOutput, RequestTimings
from tessera.values.session import (
    Frame,
    GatewayMessage,
    Heartbeat,
    Hello,
    HelloAck,
    Invite,
    KnownAs,
    SchedulerMessage,
    Standby,
    Submit,
)

MODEL = "SmolLM2-135M-Instruct"
MAX_MODEL_LEN = 8192
TIMINGS = RequestTimings(queue_us=10, ttft_us=1_000, total_us=9_000, num_preemptions=2)
OVER = object()

M = TypeVar("M")


def epoch(number: int) -> Epoch:
    return Epoch(number, bytes([number]) * 16)


class SchedulerEnd:
    """One session as the scheduler sees it: what it heard, in order, and what it is to say."""

    hello: Hello

    def __init__(self, model: ModelInfo) -> None:
        self.epoch = epoch(1)
        self.deaf_to: set[type] = {Heartbeat}
        self._model = model
        self._heard: asyncio.Queue[GatewayMessage] = asyncio.Queue()
        self._said: asyncio.Queue[Any] = asyncio.Queue()
        self.closed = asyncio.Event()

    def standby(self) -> None:
        self._said.put_nowait(response_to_proto(NO_EPOCH, Standby()))

    async def invite(self, number: int = 1) -> None:
        """Take an epoch and hear the Hello."""
        self.epoch = epoch(number)
        self.say(Invite())
        self.hello = await self.hear(Hello)

    def ack(self, *unknown: bytes, max_request_len: int = MAX_MODEL_LEN) -> None:
        self.say(HelloAck(unknown, self._model, max_request_len))

    def say(self, *messages: SchedulerMessage) -> None:
        for message in messages:
            self._said.put_nowait(response_to_proto(self.epoch, message))

    def send(self, *outputs: RequestOutput) -> None:
        self.say(Frame(outputs))

    def break_off(self) -> None:
        """End the stream after what was said."""
        self._said.put_nowait(OVER)

    async def beat(self, period_s: float) -> None:
        """Say heartbeats for ever."""
        while True:
            self.say(Heartbeat())
            await asyncio.sleep(period_s)

    def say_raw(self, data: bytes) -> None:
        """Bytes in the place of a message."""
        self._said.put_nowait(data)

    def refuse(self, error: ServiceError) -> None:
        """End the stream with a status."""
        self._said.put_nowait(error)

    async def hear(self, kind: type[M]) -> M:
        """The next thing said, without those that this end is deaf to; it must be a `kind`."""
        message = await self._heard.get()
        while isinstance(message, tuple(self.deaf_to)) and not isinstance(message, kind):
            message = await self._heard.get()
        assert isinstance(message, kind), f"heard {message}"
        return message

    def nothing_heard(self) -> bool:
        return all(isinstance(self._heard.get_nowait(), Heartbeat) for _ in range(self._heard.qsize()))

    async def serve(self, context: Any) -> None:
        reader = asyncio.create_task(self._read(context))
        try:
            while (response := await self._said.get()) is not OVER:
                if isinstance(response, ServiceError):
                    raise response
                await context.write(response)
        finally:
            reader.cancel()
            self.closed.set()

    async def _read(self, context: Any) -> None:
        while (request := await context.read()) is not grpc.aio.EOF:
            self._heard.put_nowait(request_from_proto(request))
        self.break_off()


def _register(servicer: "ScriptedScheduler", server: Any) -> None:
    """As the generated function does, save that bytes are sent as they are."""
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.Session,
        request_deserializer=session_pb2.SessionRequest.FromString,
        response_serializer=lambda message: message if isinstance(message, bytes) else message.SerializeToString(),
    )
    service = grpc.method_handlers_generic_handler("tessera.scheduler.v1.SchedulerService", {"Session": handler})
    server.add_generic_rpc_handlers((service,))


class ScriptedScheduler:
    """Listens at one address, also across `restart`."""

    def __init__(self, model: ModelInfo) -> None:
        self.model = model
        self.address = "127.0.0.1:0"
        self._opened: asyncio.Queue[SchedulerEnd] = asyncio.Queue()
        self._server: RpcServer | None = None

    async def Session(self, request_iterator: Any, context: Any) -> None:
        end = SchedulerEnd(self.model)
        self._opened.put_nowait(end)
        await end.serve(context)

    async def opened(self) -> SchedulerEnd:
        """The next session that a gateway opens; nothing has been said."""
        return await self._opened.get()

    def none_opened(self) -> bool:
        return self._opened.empty()

    async def session(self, number: int = 1) -> SchedulerEnd:
        """The next session that a gateway opens, invited; its Hello is not answered yet."""
        end = await self.opened()
        await end.invite(number)
        return end

    async def __aenter__(self) -> "ScriptedScheduler":
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def start(self) -> None:
        self._server = RpcServer(ServerConfig(self.address))
        self._server.add(_register, self, "tessera.scheduler.v1.SchedulerService")
        self.address = await self._server.start()

    async def stop(self) -> None:
        assert self._server is not None
        await self._server.stop(0)


@dataclass
class House:
    """Everything a scenario needs."""

    scheduler: ScriptedScheduler
    gateway: Gateway
    channel: grpc.aio.Channel
    stub: Any = field(init=False)

    def __post_init__(self) -> None:
        self.stub = inference_pb2_grpc.InferenceServiceStub(self.channel)

    async def session(self, *unknown: bytes, number: int = 1) -> SchedulerEnd:
        """The next session, answered, and the gateway has taken the answer."""
        end = await self.scheduler.session(number)
        end.ack(*unknown)
        await self.gateway.session.connected(30)
        return end

    async def health(self) -> bool:
        request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
        status = (await health_pb2_grpc.HealthStub(self.channel).Check(request)).status
        return status == health_pb2.HealthCheckResponse.SERVING

    async def wait_health(self, ready: bool) -> None:
        request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
        async for response in health_pb2_grpc.HealthStub(self.channel).Watch(request):
            if (response.status == health_pb2.HealthCheckResponse.SERVING) == ready:
                return

    def stream(self, timeout: float | None = None, resume: pb.Resume | None = None, **generation: Any) -> Any:
        request = pb.StreamGenerateRequest(generation=pb.Generation(**{"text": "Hello", **generation}), resume=resume)
        return self.stub.StreamGenerate(request, timeout=timeout)

    def generate(self, timeout: float | None = None, **generation: Any) -> Any:
        request = pb.GenerateRequest(generation=pb.Generation(**{"text": "Hello", **generation}))
        return self.stub.Generate(request, timeout=timeout)


def output(submit: Submit, offset: int, token_ids: list[int], finish: Finish | None = None, cached: int = 0) -> RequestOutput:
    """What a scheduler sends for the request of `submit`."""
    timings = TIMINGS if finish else None
    return RequestOutput(submit.submission.request_id, submit.subscriber, offset, tuple(token_ids), cached, finish, timings)


def known_as(submit: Submit, known: Submit) -> KnownAs:
    """What was submitted lives as what was submitted before."""
    return KnownAs(submit.submission.request_id, submit.subscriber, known.submission.request_id)


def max_tokens(count: int) -> Finish:
    return Finish(FinishReason.MAX_TOKENS, count)


def reason_and_fields(error: grpc.aio.AioRpcError) -> tuple[str, list[str]]:
    """The ErrorInfo's reason and the fields of the BadRequest."""
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    for detail in rpc_status.from_call(error).details:
        _ = detail.Unpack(info) or detail.Unpack(bad)
    return info.reason, [item.field for item in bad.field_violations]


async def refused(call: Any) -> grpc.aio.AioRpcError:
    """The error that ends a call or stream of which nothing more is wanted."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (call.read() if isinstance(call, grpc.aio.UnaryStreamCall) else call)
    return caught.value


async def read_all(call: Any) -> list[pb.StreamGenerateResponse]:
    pieces = []
    while (piece := await call.read()) is not grpc.aio.EOF:
        pieces.append(piece)
    return pieces


def assert_dense(pieces: list[pb.StreamGenerateResponse], tokens: int = 0, size: int = 0) -> None:
    """Each piece begins where the one before ended, the first at these offsets; only the last has a finish."""
    for index, piece in enumerate(pieces):
        assert (piece.token_offset, piece.text_offset) == (tokens, size)
        tokens += len(piece.token_ids)
        size += len(piece.text.encode())
        assert piece.HasField("finish") == (index == len(pieces) - 1)
