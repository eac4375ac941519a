"""The scheduler's end of one worker: attach, send batches, hear outputs; attach again whenever the stream ends.

Order of one round: Attach under the next nonce, read the whole report, open Execute, and only then send batches. Everything
heard under an earlier nonce is dropped here, so nobody behind this file sees it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import grpc
import structlog

from services.rpc.channel import open_channel
from services.scheduler.core.errors import SchedulerError
from services.worker import convert
from tessera.values.batch import ScheduledBatch, ScheduledBatchOutput
from tessera.values.identity import Epoch
from tessera.values.report import WorkerReport
from tessera.worker.v1 import worker_pb2, worker_pb2_grpc

_log = structlog.get_logger()

RETRY_S = 0.2
"""Pause between two tries to reach a worker."""

HEARTBEAT_S = 0.5
CALL_TIMEOUT_S = 5.0


class OlderEpoch(Exception):
    """A worker has accepted a later leader: this one has nothing more to say."""


class WorkerSilent(Exception):
    """Nothing was heard for longer than `worker_silence_ms`."""


class BatchWasRefused(Exception):
    """The worker refused a batch: the stream is poisoned until the next Attach."""


class WorkerListener(Protocol):
    """Who is told what a link hears. Calls are synchronous and come in the order of events. A SchedulerError that a call raises
    (another model, an output that does not fit) is the worker's fault: the link attaches it again."""

    def worker_attached(self, address: str, report: WorkerReport, send: Callable[[ScheduledBatch], None]) -> None:
        """The worker reported; batches may be sent with `send` until `worker_detached`, which comes even where this raises."""

    def worker_output(self, address: str, output: ScheduledBatchOutput) -> None:
        """One batch was executed."""

    def worker_detached(self, address: str) -> None:
        """The stream ended; batches in flight are unknown until the next report."""


async def accepted_epoch(address: str) -> Epoch:
    """The highest epoch that a worker has accepted. Waits, with retries, until the worker answers."""
    waiting_said = False
    async with open_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        while True:
            try:
                response = await stub.Describe(worker_pb2.DescribeRequest(), timeout=CALL_TIMEOUT_S)
                return convert.epoch_from_proto(response.epoch)
            except grpc.aio.AioRpcError as error:
                if not waiting_said:
                    _log.info("waiting for worker", worker=address, status=error.code().name)
                    waiting_said = True
                await asyncio.sleep(RETRY_S)


class WorkerLink:
    """Keeps one worker attached under one epoch. `run` ends only by OlderEpoch or cancellation."""

    def __init__(self, address: str, epoch: Epoch, listener: WorkerListener, silence_ms: int) -> None:
        self._address = address
        self._epoch = epoch
        self._listener = listener
        self._silence_s = silence_ms / 1000
        self._nonce = 0

    async def run(self) -> None:
        """Attach and execute for ever. Raises OlderEpoch."""
        async with open_channel(self._address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            while True:
                try:
                    await self._round(stub)
                except grpc.aio.AioRpcError as error:
                    if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                        raise OlderEpoch(error.details() or "") from error
                    _log.warning("worker stream ended", worker=self._address, status=error.code().name)
                except (WorkerSilent, BatchWasRefused, SchedulerError, convert.MalformedMessage) as error:
                    _log.warning("worker stream given up", worker=self._address, error=str(error))
                await asyncio.sleep(RETRY_S)

    async def _round(self, stub: worker_pb2_grpc.WorkerServiceStub) -> None:
        self._nonce += 1
        report = await self._attach(stub)
        outbox: asyncio.Queue[worker_pb2.ExecuteRequest] = asyncio.Queue()  # holds what is in flight at most

        def send(batch: ScheduledBatch) -> None:
            outbox.put_nowait(worker_pb2.ExecuteRequest(batch=convert.batch_to_proto(batch)))

        call = stub.Execute()
        writer = asyncio.create_task(self._write(call, outbox))
        try:
            self._listener.worker_attached(self._address, report, send)
            await self._read(call)
        finally:
            writer.cancel()
            call.cancel()
            self._listener.worker_detached(self._address)

    async def _attach(self, stub: worker_pb2_grpc.WorkerServiceStub) -> WorkerReport:
        request = worker_pb2.AttachRequest(epoch=convert.epoch_to_proto(self._epoch), nonce=self._nonce)
        parts = [part async for part in self._unsilent(stub.Attach(request))]
        return convert.report_from_proto(parts)

    async def _read(self, call: grpc.aio.StreamStreamCall) -> None:
        async for message in self._unsilent(call):
            kind = message.WhichOneof("message")
            if kind == "output":
                output = convert.output_from_proto(message.output)
                if (output.epoch, output.nonce) == (self._epoch, self._nonce):
                    self._listener.worker_output(self._address, output)
            elif kind == "refused":
                raise BatchWasRefused(f"step {message.refused.step_id}: {message.refused.reason}")

    async def _write(self, call: grpc.aio.StreamStreamCall, outbox: asyncio.Queue[worker_pb2.ExecuteRequest]) -> None:
        epoch = convert.epoch_to_proto(self._epoch)
        heartbeat = worker_pb2.ExecuteRequest(heartbeat=worker_pb2.Heartbeat(epoch=epoch, nonce=self._nonce))
        try:
            await call.write(heartbeat)  # binds the stream to its nonce
            while True:
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        request = await outbox.get()
                except TimeoutError:
                    request = heartbeat
                await call.write(request)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the stream has ended: the reader says why

    async def _unsilent(self, messages: Any) -> AsyncIterator[Any]:
        """The messages of a stream, or WorkerSilent when the next one takes too long."""
        iterator = aiter(messages)
        while True:
            try:
                async with asyncio.timeout(self._silence_s):  # not wait_for: in Python 3.11 that can swallow a cancellation
                    message = await anext(iterator)
            except StopAsyncIteration:
                return
            except TimeoutError:
                messages.cancel()
                raise WorkerSilent(f"nothing heard for {self._silence_s:g} s") from None
            yield message
