"""The scheduler's end of one worker: attach, send batches, hear outputs; attach again whenever the stream ends.

Order of one round: Attach under the next nonce, read the whole report, open Execute, and only then send batches. Everything
heard under an earlier nonce is dropped here, so nobody behind this file sees it.
"""

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, Protocol

import grpc
import structlog

from services.rpc.channel import channel_stamp, open_channel
from services.rpc.status import metadata_of, reason_of
from services.scheduler.core.errors import SchedulerError
from services.scheduler.core.step_clock import Overdue, StepClock
from services.scheduler.core.worker_loss import LEFT, LossKind, WorkerLoss
from services.worker import convert
from services.worker.reasons import NOT_SERVING, OLDER_EPOCH, SUPERSEDED
from tessera.values.batch import ScheduledBatch, ScheduledBatchOutput
from tessera.values.identity import Epoch
from tessera.values.protocol import PROTOCOL_VERSION, VERSION_SKEW
from tessera.values.report import WorkerReport
from tessera.worker.v1 import worker_pb2, worker_pb2_grpc

_log = structlog.get_logger()

RETRY_S = 0.2
"""Pause before a worker that went away is tried again."""

UNFIT_RETRY_S_MAX = 5.0
"""A worker that answers, but cannot be used (another model or version, refused batches), is tried less and less often, down to this."""

HEARTBEAT_S = 0.5
TURNS_PER_SILENCE = 8
"""Silence is counted in turns of a loop: a pause of this process is then one turn, and no silence of anybody else."""


class OlderEpoch(Exception):
    """`worker` has accepted a later leader, of epoch `number` (0: it did not say): this one has nothing more to say."""

    def __init__(self, worker: str, message: str, number: int = 0) -> None:
        super().__init__(message)
        self.worker, self.number = worker, number


class WorkerSilent(Exception):
    """Nothing was heard for longer than `worker_silence_ms`."""


class WorkerHangs(Exception):
    """The worker lives, but takes far too long over a batch."""

    def __init__(self, overdue: Overdue) -> None:
        super().__init__(str(overdue))


class VersionSkew(Exception):
    """The worker speaks another version of the protocol."""

    def __init__(self, protocol: int) -> None:
        super().__init__(
            f"the worker speaks protocol {protocol}, this scheduler {PROTOCOL_VERSION}: run the same release of both"
        )


class SameWorker(Exception):
    """The worker is attached under another of its names: under two, each Attach would end the other's stream."""

    def __init__(self, other: str) -> None:
        super().__init__(f"it is the process that is attached as {other}: give every worker one --worker, and one name")


class StreamEnded(Exception):
    """The worker ended the stream without a reason."""


class BatchWasRefused(Exception):
    """The worker refused a batch: the stream is poisoned until the next Attach."""

    def __init__(self, step_id: int, reason: str) -> None:
        super().__init__(f"step {step_id}: {reason}")
        self.step_id = step_id


class WorkerListener(Protocol):
    """Who is told what a link hears. Calls are synchronous and come in the order of events. A SchedulerError that a call raises
    (another model, an output that does not fit) is the worker's fault: the link attaches it again."""

    def worker_attached(self, address: str, report: WorkerReport, send: Callable[[ScheduledBatch], None]) -> None:
        """The worker reported; batches may be sent with `send` until `worker_detached`, which comes even where this raises."""

    def worker_output(self, address: str, output: ScheduledBatchOutput) -> None:
        """One batch was executed."""

    def worker_leaving(self, address: str) -> None:
        """The worker is to end. It answers batches until it is detached."""

    def worker_detached(self, address: str, loss: WorkerLoss) -> None:
        """The stream ended; batches in flight are unknown until the next report."""


async def ask_epochs(addresses: Iterable[str], within_s: float) -> dict[str, Epoch]:
    """The highest epoch that each worker has accepted, all asked at once; who does not answer in time is left out."""
    asked = [asyncio.create_task(_ask_epoch(address, within_s)) for address in addresses]
    return dict(answer for answer in await asyncio.gather(*asked) if answer is not None)


async def _ask_epoch(address: str, within_s: float) -> tuple[str, Epoch] | None:
    async with open_channel(address) as channel:
        try:
            response = await worker_pb2_grpc.WorkerServiceStub(channel).Describe(worker_pb2.DescribeRequest(), timeout=within_s)
        except grpc.aio.AioRpcError as error:
            _log.debug("worker does not answer", worker=address, status=error.code().name)
            return None
    return address, convert.epoch_from_proto(response.epoch)  # a worker of another version counts too


class WorkerLink:
    """Keeps one worker attached under one epoch. `run` ends by OlderEpoch, by cancellation, or once it is retired.

    `nonces` grow with every use; links that may reach one worker under one epoch share them, and `holder_of` a boot id says which of them
    has it attached.
    """

    def __init__(
        self,
        address: str,
        epoch: Epoch,
        listener: WorkerListener,
        silence_ms: int,
        nonces: Iterator[int] | None = None,
        holder_of: Callable[[bytes], str | None] = lambda _: None,
    ) -> None:
        self.attached_boot_id: bytes | None = None  # while a stream is open
        self._holder_of = holder_of
        self._address = address
        self._epoch = epoch
        self._listener = listener
        self._silence_s = silence_ms / 1000
        self._nonces = nonces if nonces is not None else itertools.count(1)
        self._nonce = 0
        self._clock = StepClock()
        self._boot_id = b""
        self._silent_s = 0.0
        self._retry_s = RETRY_S
        self._said = ""
        self._retired = asyncio.Event()

    def retire(self) -> None:
        """The worker is no longer one of ours: do not attach it again. A stream that is open goes on until it ends."""
        self._retired.set()

    def reinstate(self) -> None:
        """Take `retire` back; a `run` that has ended meanwhile is to be run again."""
        self._retired.clear()

    async def run(self) -> None:
        """Attach and execute until retired. Raises OlderEpoch."""
        while not self._retired.is_set():
            await self._run_on_one_channel()

    async def _run_on_one_channel(self) -> None:
        """Until retired, or until there are new certificates when a round is over."""
        stamp = channel_stamp()
        async with open_channel(self._address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            while not self._retired.is_set() and channel_stamp() == stamp:
                try:
                    await self._round(stub)
                except grpc.aio.AioRpcError as error:
                    self._note_status(error)
                except (WorkerSilent, WorkerHangs, StreamEnded) as error:
                    self._note("worker lost", str(error))
                except (VersionSkew, SameWorker, BatchWasRefused, SchedulerError, convert.MalformedMessage) as error:
                    self._note("worker is not used", str(error), is_unfit=True)
                await self._pause()

    async def _round(self, stub: worker_pb2_grpc.WorkerServiceStub) -> None:
        described = await stub.Describe(worker_pb2.DescribeRequest(), timeout=self._silence_s)
        if described.protocol != PROTOCOL_VERSION:
            raise VersionSkew(described.protocol)
        holder = self._holder_of(described.description.boot_id)
        if holder is not None:
            raise SameWorker(holder)
        self._nonce = next(self._nonces)
        report = await self._attach(stub)
        if self._retired.is_set():
            return
        outbox: asyncio.Queue[worker_pb2.ExecuteRequest] = asyncio.Queue()  # holds what is in flight at most

        def send(batch: ScheduledBatch) -> None:
            outbox.put_nowait(worker_pb2.ExecuteRequest(batch=convert.batch_to_proto(batch)))
            self._clock.sent(batch.step_id, batch.total_tokens, may_join=not batch.num_decodes)

        self._clock.restart(is_same_boot=report.description.boot_id == self._boot_id)
        self._boot_id = report.description.boot_id
        call = stub.Execute()
        loss = LEFT
        try:
            self._listener.worker_attached(self._address, report, send)
            self.attached_boot_id = self._boot_id
            self._said = ""
            await _first_of(self._read(call), self._write(call, outbox), self._watch())
        except Exception as error:
            loss = _loss_by(error)
            raise
        finally:
            call.cancel()
            self.attached_boot_id = None
            self._listener.worker_detached(self._address, loss)

    async def _attach(self, stub: worker_pb2_grpc.WorkerServiceStub) -> WorkerReport:
        request = worker_pb2.AttachRequest(
            epoch=convert.epoch_to_proto(self._epoch), nonce=self._nonce, protocol=PROTOCOL_VERSION
        )
        parts: list[worker_pb2.AttachResponse] = []
        call = stub.Attach(request)
        self._clock.restart(is_same_boot=True)  # what was in flight is over, and the worker finishes it before it reports
        try:
            await _first_of(self._read_report(call, parts), self._watch())
        finally:
            call.cancel()
        report = convert.report_from_proto(parts)
        if report.nonce != self._nonce:
            raise convert.MalformedMessage(f"report: nonce {report.nonce} instead of {self._nonce}")
        return report

    async def _read_report(self, call: Any, parts: list[worker_pb2.AttachResponse]) -> None:
        async for part in call:
            self._silent_s = 0.0
            if part.WhichOneof("part") != "heartbeat":
                parts.append(part)

    async def _read(self, call: Any) -> None:
        async for message in call:
            self._silent_s = 0.0
            kind = message.WhichOneof("message")
            if kind == "output":
                output = convert.output_from_proto(message.output)
                if (output.epoch, output.nonce) == (self._epoch, self._nonce):
                    self._clock.answered(output.step_id, output.compute_us)
                    self._listener.worker_output(self._address, output)
                    self._retry_s = RETRY_S
            elif kind == "leaving":
                _log.info("worker leaves", worker=self._address)
                self._listener.worker_leaving(self._address)
            elif kind == "refused":
                raise BatchWasRefused(message.refused.step_id, message.refused.reason)
        raise StreamEnded("the stream ended")

    async def _write(self, call: Any, outbox: asyncio.Queue[worker_pb2.ExecuteRequest]) -> None:
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
            await asyncio.get_running_loop().create_future()  # the stream has ended: the reader says why

    async def _watch(self) -> None:
        """Count the time in which nothing was heard, and that of the batch in flight. Raises WorkerSilent, WorkerHangs."""
        loop, turn_s = asyncio.get_running_loop(), self._silence_s / TURNS_PER_SILENCE
        self._silent_s = 0.0
        while True:
            before = loop.time()
            await asyncio.sleep(turn_s)
            passed_s = min(loop.time() - before, 2 * turn_s)
            self._silent_s += passed_s
            if self._silent_s > self._silence_s:
                raise WorkerSilent(f"nothing heard for {self._silence_s:g} s")
            overdue = self._clock.advance(int(1e6 * passed_s))
            if overdue is not None:
                raise WorkerHangs(overdue)

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(self._retry_s):
                await self._retired.wait()
        except TimeoutError:
            return

    def _note_status(self, error: grpc.aio.AioRpcError) -> None:
        """Log how a call ended. Raises OlderEpoch."""
        reason, metadata = reason_of(error), metadata_of(error)
        if reason == OLDER_EPOCH and metadata.get("epoch_instance") != self._epoch.instance.hex():
            raise OlderEpoch(self._address, error.details() or "", int(metadata.get("epoch_number", "0"))) from error
        text = error.details() or error.code().name
        if reason == NOT_SERVING:
            self._note("worker does not serve", text)
        else:
            self._note("worker lost", text, is_unfit=reason == VERSION_SKEW)

    def _note(self, event: str, text: str, *, is_unfit: bool = False) -> None:
        """Log an event that is not a repetition. A worker that is unfit is tried again later and later."""
        if is_unfit:
            self._retry_s = min(2 * self._retry_s, UNFIT_RETRY_S_MAX)
        if (said := f"{event}: {text}") != self._said:
            self._said = said
            _log.warning(event, worker=self._address, reason=text)


def _loss_by(error: Exception) -> WorkerLoss:
    """What the end of a stream says about what was in flight."""
    match error:
        case BatchWasRefused(step_id=step_id):
            return WorkerLoss(LossKind.REFUSED, step_id, str(error))
        case SchedulerError() | convert.MalformedMessage():
            return WorkerLoss(LossKind.REFUSED, text=str(error))
        case grpc.aio.AioRpcError() if reason_of(error) in (NOT_SERVING, SUPERSEDED, OLDER_EPOCH):
            return LEFT
        case _:
            return WorkerLoss(LossKind.BROKEN, text=str(error))


async def _first_of(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run all until the first ends; the others are cancelled. Raises what it raised."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
