"""One worker link against a worker whose every word the test says."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scripted_worker import ScriptedWorker, scripted_worker

from services.scheduler.core.errors import ModelMismatch
from services.scheduler.core.worker_loss import WorkerLoss
from services.scheduler.worker_link import OlderEpoch, WorkerLink
from tessera.values.batch import ScheduledBatch, ScheduledBatchOutput
from tessera.values.identity import Epoch
from tessera.values.report import WorkerReport
from tessera.worker.v1 import worker_pb2

RunAsync = Callable[..., Any]

EPOCH = Epoch(3, b"s" * 16)
PATIENT_MS = 60_000


class Listener:
    """What a link told, in order; `send` of the present attach."""

    def __init__(self) -> None:
        self.send: Callable[[ScheduledBatch], None] | None = None
        self.mismatches = 0  # how many of the next attaches are refused
        self._events: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()

    def worker_attached(self, address: str, report: WorkerReport, send: Callable[[ScheduledBatch], None]) -> None:
        if self.mismatches:
            self.mismatches -= 1
            raise ModelMismatch("another model")
        self.send = send
        self._events.put_nowait(("attached", report))

    def worker_output(self, address: str, output: ScheduledBatchOutput) -> None:
        self._events.put_nowait(("output", output))

    def worker_detached(self, address: str, loss: WorkerLoss) -> None:
        self.send = None
        self._events.put_nowait(("detached", loss))

    async def hear(self, kind: str) -> Any:
        """The next event, which must be a `kind`."""
        found, what = await self._events.get()
        assert found == kind
        return what

    def batch(self, report: WorkerReport, step_id: int, **changes: Any) -> ScheduledBatch:
        """Send and return a batch without rows."""
        none = np.array([], np.int32)
        batch = ScheduledBatch(EPOCH, report.nonce, step_id, 0, (), (), none, none, none, none, none, 0)
        batch = replace(batch, **changes)
        assert self.send is not None
        self.send(batch)
        return batch


@asynccontextmanager
async def linked(silence_ms: int = PATIENT_MS, mismatches: int = 0) -> AsyncIterator[tuple[ScriptedWorker, Listener]]:
    """A worker and the listener of a link that runs beside the body."""
    async with scripted_worker() as worker:
        listener = Listener()
        listener.mismatches = mismatches
        running = asyncio.create_task(WorkerLink(worker.address, EPOCH, listener, silence_ms).run())
        try:
            yield worker, listener
        finally:
            running.cancel()
            await asyncio.wait((running,))
            assert running.cancelled(), running.exception()


def output_of(batch: ScheduledBatch) -> ScheduledBatchOutput:
    none = np.array([], np.int32)
    return ScheduledBatchOutput(batch.epoch, batch.nonce, batch.step_id, none, none)


def test_a_batch_goes_out_and_its_output_comes_back(run_async: RunAsync) -> None:
    async def scenario() -> None:
        async with linked() as (worker, listener):
            report = await listener.hear("attached")
            stream = await worker.stream()
            bound = await stream.heartbeat()
            assert (bound.epoch.number, bound.nonce) == (EPOCH.number, report.nonce) == (3, 1)
            sent = listener.batch(report, 1)
            received = await stream.batch()
            assert (received.epoch, received.nonce, received.step_id) == (EPOCH, 1, 1)
            stream.answer(output_of(sent))
            assert (await listener.hear("output")).step_id == 1

    run_async(scenario())


def test_an_output_of_an_earlier_attach_or_term_is_dropped(run_async: RunAsync) -> None:
    async def scenario() -> None:
        async with linked() as (worker, listener):
            report = await listener.hear("attached")
            stream = await worker.stream()
            output = output_of(listener.batch(report, 7))
            stream.answer(replace(output, nonce=report.nonce - 1))
            stream.answer(replace(output, epoch=Epoch(2, b"o" * 16)))
            stream.answer(replace(output, step_id=8))
            assert (await listener.hear("output")).step_id == 8

    run_async(scenario())


def _refuse(stream: Any, batch: ScheduledBatch) -> None:
    stream.refuse(batch.step_id, "too many rows")


def _end(stream: Any, batch: ScheduledBatch) -> None:
    stream.break_off()


def _garble(stream: Any, batch: ScheduledBatch) -> None:
    stream.say(worker_pb2.ExecuteResponse(output=worker_pb2.ScheduledBatchOutput(step_id=0)))


@pytest.mark.parametrize("fault", [_refuse, _end, _garble])
def test_a_stream_that_cannot_go_on_is_followed_by_another_attach(fault: Callable[..., None], run_async: RunAsync) -> None:
    async def scenario() -> None:
        async with linked() as (worker, listener):
            report = await listener.hear("attached")
            stream = await worker.stream()
            fault(stream, listener.batch(report, 1))
            await listener.hear("detached")
            again = await listener.hear("attached")
            assert again.nonce == report.nonce + 1
            await worker.stream()

    run_async(scenario())


def test_a_silent_worker_is_attached_again(run_async: RunAsync) -> None:
    async def scenario() -> None:
        async with linked(silence_ms=100) as (_, listener):
            await listener.hear("attached")
            await listener.hear("detached")
            assert (await listener.hear("attached")).nonce == 2

    run_async(scenario())


def test_a_worker_that_does_not_report_is_asked_again(run_async: RunAsync) -> None:
    async def scenario() -> None:
        async with linked(silence_ms=100) as (worker, listener):
            await listener.hear("attached")
            worker.answers.clear()
            await listener.hear("detached")
            await asyncio.sleep(0.5)  # longer than silence and pause: at least one Attach is given up
            worker.answers.set()
            assert (await listener.hear("attached")).nonce > 2

    run_async(scenario())


def test_a_later_leader_at_the_worker_ends_the_link(run_async: RunAsync) -> None:
    async def scenario() -> None:
        async with scripted_worker() as worker:
            worker.refuses = True
            with pytest.raises(OlderEpoch, match="older epoch"):
                await WorkerLink(worker.address, EPOCH, Listener(), PATIENT_MS).run()

    run_async(scenario())


def test_a_worker_that_may_not_be_used_keeps_no_stream(run_async: RunAsync) -> None:
    async def scenario() -> None:
        async with linked(mismatches=1) as (worker, listener):
            await listener.hear("detached")
            assert (await listener.hear("attached")).nonce == 2
            stream = await worker.stream()
            if (await stream.heartbeat()).nonce == 1:  # the refused round had reached the worker
                await stream.closed.wait()

    run_async(scenario())


def test_a_batch_that_cannot_be_sent_fails_where_it_was_made(run_async: RunAsync) -> None:
    async def scenario() -> None:
        async with linked() as (_, listener):
            report = await listener.hear("attached")
            with pytest.raises(AssertionError, match="not an int32 column"):
                listener.batch(report, 1, slots=np.array([], np.int64))

    run_async(scenario())


class _Call:
    """A stream of heartbeats that come when the test says."""

    def __init__(self) -> None:
        self.came: asyncio.Queue[worker_pb2.ExecuteResponse] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        while True:
            yield await self.came.get()

    def cancel(self) -> None:
        raise AssertionError("nobody was silent")


@pytest.mark.parametrize("turns", range(5))
def test_a_link_ends_when_cancelled_just_as_a_message_comes(turns: int, run_async: RunAsync) -> None:
    async def scenario() -> None:
        call = _Call()
        reading = asyncio.create_task(WorkerLink("unused", EPOCH, Listener(), PATIENT_MS)._read(call))
        await asyncio.sleep(0.01)
        call.came.put_nowait(worker_pb2.ExecuteResponse())
        for _ in range(turns):
            await asyncio.sleep(0)
        reading.cancel()
        done, _ = await asyncio.wait((reading,), timeout=5)
        assert done, "the cancellation was lost"

    run_async(scenario())
