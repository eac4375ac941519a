"""The worker's gRPC face: who may command it, and the stream of batches and outputs.

An Attach takes the worker over for one (epoch, nonce); the Execute stream that follows is bound to the same pair by its first
message. A message of another pair changes nothing. Whoever is told "older epoch" has a successor; everything else that goes wrong here is
mended by the next Attach.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import structlog

from services.rpc.errors import Aborted, FailedPrecondition, FieldViolation, InvalidArgument, ServiceError, Unavailable
from services.worker import convert
from services.worker.engine_thread import EngineThread
from services.worker.execute_stream import ExecuteStream
from services.worker.reasons import NOT_SERVING, OLDER_EPOCH, SUPERSEDED
from tessera.values.identity import EPOCH_LEAP_MAX, NO_EPOCH, Epoch
from tessera.values.protocol import PROTOCOL_VERSION, VERSION_SKEW
from tessera.values.report import WorkerReport
from tessera.worker.v1 import worker_pb2, worker_pb2_grpc

_log = structlog.get_logger()

READ_BLOCKS_MAX = 4096
"""Blocks of one ReadBlocks: they are copied all at once."""

LEAVE_POLL_S = 0.05
"""How often a worker that is to end looks whether its slots are empty; each look waits for the batch that runs."""

SERVICE_NAME = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name


@dataclass(slots=True, eq=False)
class Attachment:
    """Who commands the worker. `reported`: the report was taken, batches may come. `stream`: the one Execute stream, even when over."""

    epoch: Epoch
    nonce: int
    reported: bool = False
    stream: ExecuteStream | None = None


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Serves one engine. Every call is UNAVAILABLE before `open` and after `drain`."""

    def __init__(self, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._thread: EngineThread | None = None
        self._attachment = Attachment(NO_EPOCH, 0)
        self._closed_because = "the model is still loading"
        self._is_leaving = False

    def open(self, thread: EngineThread) -> None:
        """Serve this engine from now on."""
        self._thread = thread

    async def leave(self, grace_s: float) -> None:
        """Say that this worker is to end, and go on computing until its requests have gone elsewhere, or nobody commands it; at most
        `grace_s`. Raises EngineCrashed."""
        self._is_leaving = True
        if self._attachment.stream is not None:
            self._attachment.stream.leave()
        try:
            async with asyncio.timeout(grace_s):
                while self._is_commanded() and await self._holds_slots():  # noqa: ASYNC110 - it changes in the engine's thread
                    await asyncio.sleep(LEAVE_POLL_S)
        except TimeoutError:
            _log.warning("ending with requests that went nowhere else", grace_s=grace_s)

    async def drain(self) -> None:
        """Finish the started batch, send its output, end the stream, and take no more calls."""
        thread, self._thread = self._thread, None
        self._closed_because = "the worker is shutting down"
        if thread is not None:
            await thread.fence()
        if self._attachment.stream is not None:
            self._attachment.stream.end(self._unavailable())

    async def Describe(self, request: worker_pb2.DescribeRequest, context: Any) -> worker_pb2.DescribeResponse:
        """What the worker is, and the highest epoch it accepted."""
        description = self._opened().engine.description
        return worker_pb2.DescribeResponse(
            description=convert.description_to_proto(description),
            epoch=convert.epoch_to_proto(self._attachment.epoch),
            protocol=PROTOCOL_VERSION,
        )

    async def Attach(self, request: worker_pb2.AttachRequest, context: Any) -> AsyncIterator[worker_pb2.AttachResponse]:
        """Take the worker over: fence, finish what has started, report. Says that it lives for as long as that takes."""
        thread = self._opened()
        attachment = self._accept(request)
        reporting = asyncio.create_task(self._report(thread, attachment))
        try:
            while not (await asyncio.wait([reporting], timeout=self._heartbeat_s))[0]:
                beat = worker_pb2.Heartbeat(epoch=convert.epoch_to_proto(attachment.epoch), nonce=attachment.nonce)
                yield worker_pb2.AttachResponse(nonce=attachment.nonce, heartbeat=beat)
            report = reporting.result()
        finally:
            reporting.cancel()
        for part in convert.report_to_proto(report):
            self._check_current(attachment)
            yield part

    async def Execute(
        self, request_iterator: AsyncIterator[worker_pb2.ExecuteRequest], context: Any
    ) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        """Execute batches in order. Ends with the client's half, a later Attach, or the worker's end."""
        self._opened()
        stream = ExecuteStream(self._attachment.epoch, self._attachment.nonce, self._heartbeat_s)
        reader = asyncio.create_task(self._read(request_iterator, stream))
        reader.add_done_callback(lambda task: stream.end(None if task.cancelled() else task.exception()))
        try:
            async for response in stream.responses():
                yield response
        finally:
            reader.cancel()
            stream.end()
            if self._attachment.stream is stream and self._thread is not None:
                self._thread.poison()  # what has started ends, and its result stays in the slots

    async def ReadBlocks(
        self, request: worker_pb2.ReadBlocksRequest, context: Any
    ) -> AsyncIterator[worker_pb2.ReadBlocksResponse]:
        """Copies of KV blocks, made between two batches."""
        thread = self._opened()
        geometry, block_ids = thread.engine.description.geometry, list(request.block_ids)
        limit = "num_host_blocks" if request.is_host else "num_blocks"
        num_blocks = geometry.num_host_blocks if request.is_host else geometry.num_blocks
        if len(block_ids) > READ_BLOCKS_MAX or len(set(block_ids)) < len(block_ids):
            text = f"{len(block_ids)} ids, {len(set(block_ids))} of them different; at most {READ_BLOCKS_MAX} different ones may be read"
            raise InvalidArgument((FieldViolation("block_ids", text),))
        if max(block_ids, default=-1) >= num_blocks:
            raise InvalidArgument((FieldViolation("block_ids", f"{max(block_ids)} is not below {limit}, {num_blocks}"),))
        for block in await thread.between_batches(lambda engine: engine.read_blocks(block_ids, is_host=request.is_host)):
            kv = block.kv.astype("<f4", copy=False).tobytes()
            yield worker_pb2.ReadBlocksResponse(block_id=block.block_id, last_write_step=block.last_write_step, kv=kv)

    async def _report(self, thread: EngineThread, attachment: Attachment) -> WorkerReport:
        """What the engine holds once the started batch has ended; batches of this attachment may come from then on."""
        await thread.fence()
        self._check_current(attachment)
        report = thread.engine.report(attachment.nonce)
        attachment.reported = True
        _log.info(
            "attached",
            epoch=attachment.epoch.number,
            nonce=attachment.nonce,
            last_step=report.last_step,
            slots=len(report.slots),
            dropped=len(report.dropped),
        )
        return report

    def _accept(self, request: worker_pb2.AttachRequest) -> Attachment:
        """The new attachment, in place of the old, whose stream ends at once."""
        if request.protocol != PROTOCOL_VERSION:
            raise FailedPrecondition(
                f"the scheduler speaks protocol {request.protocol}, this worker {PROTOCOL_VERSION}: run the same release of both",
                reason=VERSION_SKEW,
            )
        epoch, held = _epoch_of(request), self._attachment
        if epoch == NO_EPOCH or request.nonce < 1:
            field = "epoch" if epoch == NO_EPOCH else "nonce"
            raise InvalidArgument((FieldViolation(field, "must be set, from 1"),))
        if epoch.number - held.epoch.number > EPOCH_LEAP_MAX:
            text = f"{epoch.number} cannot have been reached: the last leader's is {held.epoch.number}"
            raise InvalidArgument((FieldViolation("epoch", text),))
        if not epoch.supersedes(held.epoch) or (epoch == held.epoch and request.nonce <= held.nonce):
            raise self._older_epoch()
        self._attachment = Attachment(epoch, request.nonce)
        if held.stream is not None:
            held.stream.end(self._superseded(held.epoch))
        return self._attachment

    async def _read(self, requests: AsyncIterator[worker_pb2.ExecuteRequest], stream: ExecuteStream) -> None:
        """Take what the scheduler sends. Raises ServiceError where the first message does not bind the stream."""
        bound: Attachment | None = None
        async for request in requests:
            kind = request.WhichOneof("message")
            if kind is None:
                continue
            message = request.batch if kind == "batch" else request.heartbeat
            if bound is None:
                bound = self._bind(message, stream)
                bound_epoch = convert.epoch_to_proto(bound.epoch)
            if self._attachment is not bound:
                return
            if message.nonce != bound.nonce or message.epoch != bound_epoch:
                continue
            if kind == "batch" and not stream.refused:
                self._submit(request.batch, stream)

    def _bind(self, message: worker_pb2.ScheduledBatch | worker_pb2.Heartbeat, stream: ExecuteStream) -> Attachment:
        """Bind the stream to the attachment that its first message names."""
        held = self._attachment
        epoch = _epoch_of(message)
        if (epoch, message.nonce) != (held.epoch, held.nonce):
            raise self._superseded(epoch)
        if not held.reported:
            raise Aborted("the report of this Attach has not been sent: read it to its end first", reason="ATTACH_UNFINISHED")
        if held.stream is not None:
            raise Aborted("this Attach has had its Execute stream: attach again", reason="ATTACH_USED")
        held.stream = stream
        if self._is_leaving:
            stream.leave()
        return held

    def _submit(self, message: worker_pb2.ScheduledBatch, stream: ExecuteStream) -> None:
        thread = self._thread
        if thread is None:  # draining
            return
        in_flight_max = thread.engine.description.limits.max_batches_in_flight
        try:
            if stream.in_flight >= in_flight_max:
                raise convert.MalformedMessage(f"{stream.in_flight} batches are in flight, at most {in_flight_max} may be")
            batch = convert.batch_from_proto(message)
        except convert.MalformedMessage as error:
            thread.poison()
            stream.refuse(message.step_id, str(error))
            return
        stream.in_flight += 1
        thread.submit(batch, stream.tell)

    def _check_current(self, attachment: Attachment) -> None:
        if self._attachment is not attachment:
            raise self._superseded(attachment.epoch)

    def _superseded(self, epoch: Epoch) -> ServiceError:
        """Why a stream under `epoch` and an earlier nonce is over."""
        held = self._attachment
        if not epoch.supersedes(held.epoch):
            return self._older_epoch()
        return Aborted(
            f"not the current Attach, which is nonce {held.nonce} of epoch {held.epoch.number}: attach again",
            reason=SUPERSEDED,
        )

    def _older_epoch(self) -> FailedPrecondition:
        held = self._attachment
        return FailedPrecondition(
            f"older epoch: this worker has accepted epoch {held.epoch.number} of instance {held.epoch.instance.hex()}, nonce {held.nonce}",
            reason=OLDER_EPOCH,
            metadata={
                "epoch_number": str(held.epoch.number),
                "epoch_instance": held.epoch.instance.hex(),
                "nonce": str(held.nonce),
            },
        )

    async def _holds_slots(self) -> bool:
        return await self._opened().between_batches(lambda engine: engine.num_slots_held) > 0

    def _is_commanded(self) -> bool:
        return self._attachment.stream is not None and not self._attachment.stream.has_ended

    def _opened(self) -> EngineThread:
        if self._thread is None:
            raise self._unavailable()
        return self._thread

    def _unavailable(self) -> Unavailable:
        return Unavailable(self._closed_because, reason=NOT_SERVING, retry_after_ms=0)


def _epoch_of(message: worker_pb2.AttachRequest | worker_pb2.ScheduledBatch | worker_pb2.Heartbeat) -> Epoch:
    try:
        return convert.epoch_from_proto(message.epoch)
    except convert.MalformedMessage as error:
        raise InvalidArgument.of(error) from error
