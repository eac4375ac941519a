"""A worker in this process for the scheduler's end to attach to: the checking worker behind real gRPC, with every fault at the test's word."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
from core.fake_worker import FakeWorker

from services.rpc.errors import FailedPrecondition, Unavailable
from services.rpc.server import RpcServer, ServerConfig
from services.worker import convert
from tessera.values.batch import ScheduledBatch, ScheduledBatchOutput
from tessera.values.protocol import PROTOCOL_VERSION
from tessera.worker.v1 import worker_pb2, worker_pb2_grpc

_NUMBERS = itertools.count(1)


class StreamOver(Exception):
    """The scheduler has ended its half."""


class ExecuteEnd:
    """One Execute stream as the worker sees it. It says only what the test says, beats included."""

    def __init__(self, context: Any) -> None:
        self.closed = asyncio.Event()
        self._context = context
        self._said: asyncio.Queue[worker_pb2.ExecuteResponse | None] = asyncio.Queue()
        self._error: Exception | None = None

    async def batch(self) -> ScheduledBatch:
        """The next batch; heartbeats before it are passed over."""
        while (request := await self._read()).WhichOneof("message") == "heartbeat":
            pass
        return convert.batch_from_proto(request.batch)

    async def heartbeat(self) -> worker_pb2.Heartbeat:
        """The next request, which must be a heartbeat."""
        request = await self._read()
        assert request.WhichOneof("message") == "heartbeat", request
        return request.heartbeat

    def answer(self, output: ScheduledBatchOutput) -> None:
        self.say(worker_pb2.ExecuteResponse(output=convert.output_to_proto(output)))

    def refuse(self, step_id: int, reason: str) -> None:
        self.say(worker_pb2.ExecuteResponse(refused=worker_pb2.Refused(step_id=step_id, reason=reason)))

    def say(self, response: worker_pb2.ExecuteResponse) -> None:
        self._said.put_nowait(response)

    def beat(self) -> None:
        self.say(worker_pb2.ExecuteResponse(heartbeat=worker_pb2.Heartbeat()))

    def break_off(self, error: Exception | None = None) -> None:
        """End the stream after what was said, with OK or with `error`."""
        self._error = error
        self._said.put_nowait(None)

    async def responses(self) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        try:
            while (response := await self._said.get()) is not None:
                yield response
            if self._error is not None:
                raise self._error
        finally:
            self.closed.set()

    async def _read(self) -> worker_pb2.ExecuteRequest:
        request = await self._context.read()
        if request is grpc.aio.EOF:
            raise StreamOver
        return request


class ScriptedWorker(worker_pb2_grpc.WorkerServiceServicer):
    """`fake` holds the state. `described` and `asked` are set by the first Describe and Attach, `num_attaches` counts. `answers` cleared: an
    Attach waits, and says that it lives where `beats_s` is set. `refuses`: it ends with "older epoch", or with `refusal` where one is set.
    `wrong_nonce` is added to the nonce of a report. `is_silent`: a Describe fails."""

    def __init__(self, fake: FakeWorker | None = None) -> None:
        self.fake = fake or FakeWorker()
        self.fake.boots += 1000 * next(_NUMBERS)  # no two processes have one boot id
        self.fake.restart()
        self.described, self.asked = asyncio.Event(), asyncio.Event()
        self.answers = asyncio.Event()
        self.answers.set()
        self.refuses = False
        self.refusal: Exception | None = None
        self.beats_s: float | None = None
        self.wrong_nonce = 0
        self.is_silent = False
        self.num_attaches = 0
        self.protocol = PROTOCOL_VERSION
        self.address = ""
        self._streams: asyncio.Queue[ExecuteEnd] = asyncio.Queue()
        self._working: ExecuteEnd | None = None

    async def Describe(self, request: Any, context: Any) -> worker_pb2.DescribeResponse:
        self.described.set()
        if self.is_silent:
            raise Unavailable("told to be silent", reason="SILENT", retry_after_ms=0)
        return worker_pb2.DescribeResponse(
            description=convert.description_to_proto(self.fake.description),
            epoch=convert.epoch_to_proto(self.fake.epoch),
            protocol=self.protocol,
        )

    async def Attach(self, request: worker_pb2.AttachRequest, context: Any) -> AsyncIterator[worker_pb2.AttachResponse]:
        self.asked.set()
        self.num_attaches += 1
        if self.refusal is not None:
            raise self.refusal
        if self.refuses:
            raise FailedPrecondition("older epoch", reason="OLDER_EPOCH", metadata={"epoch_number": "7"})
        while not self.answers.is_set():
            try:
                async with asyncio.timeout(self.beats_s):
                    await self.answers.wait()
            except TimeoutError:
                yield worker_pb2.AttachResponse(nonce=request.nonce, heartbeat=worker_pb2.Heartbeat(nonce=request.nonce))
        for part in convert.report_to_proto(self.fake.attach(convert.epoch_from_proto(request.epoch), request.nonce)):
            part.nonce += self.wrong_nonce
            yield part

    async def Execute(self, request_iterator: Any, context: Any) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        end = ExecuteEnd(context)
        self._streams.put_nowait(end)
        async for response in end.responses():
            yield response

    async def stream(self) -> ExecuteEnd:
        """The next Execute stream that the scheduler opens."""
        return await self._streams.get()

    def break_off(self) -> None:
        """End the stream on which `work` is."""
        assert self._working is not None
        self._working.break_off()

    async def work(self) -> None:
        """Execute whatever comes, on one stream after the other; cancel it to stop."""
        while True:
            self._working = end = await self.stream()
            with suppress(StreamOver):
                while True:
                    self.fake.enqueue(await end.batch())
                    end.answer(self.fake.step())


@asynccontextmanager
async def scripted_worker(fake: FakeWorker | None = None) -> AsyncIterator[ScriptedWorker]:
    """A worker that listens for as long as the body runs."""
    worker = ScriptedWorker(fake)
    server = RpcServer(ServerConfig("127.0.0.1:0"))
    server.add(worker_pb2_grpc.add_WorkerServiceServicer_to_server, worker, "tessera.worker.v1.WorkerService")
    worker.address = await server.start()
    try:
        yield worker
    finally:
        await server.stop(0)
