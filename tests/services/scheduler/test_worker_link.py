"""One worker link against a worker whose every word the test says."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scripted_worker import ScriptedWorker, scripted_worker

from services.rpc.errors import Aborted, FailedPrecondition, Unavailable
from services.scheduler.core import step_clock
from services.scheduler.core.errors import ModelMismatch
from services.scheduler.core.worker_loss import LossKind, WorkerLoss
from services.scheduler.worker_link import RETRY_S, UNFIT_RETRY_S_MAX, OlderEpoch, WorkerLink, ask_epochs
from services.worker.reasons import NOT_SERVING, SUPERSEDED
from tessera.values.batch import ScheduledBatch, ScheduledBatchOutput
from tessera.values.identity import NO_EPOCH, Epoch
from tessera.values.protocol import PROTOCOL_VERSION, VERSION_SKEW
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

    def worker_leaving(self, address: str) -> None:
        self._events.put_nowait(("leaving", address))

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


def _crash(stream: Any, batch: ScheduledBatch) -> None:
    stream.break_off(RuntimeError("a bug"))


def _garble(stream: Any, batch: ScheduledBatch) -> None:
    stream.say(worker_pb2.ExecuteResponse(output=worker_pb2.ScheduledBatchOutput(step_id=0)))


def _shut_down(stream: Any, batch: ScheduledBatch) -> None:
    stream.break_off(Unavailable("the worker is shutting down", reason=NOT_SERVING, retry_after_ms=0))


def _attach_elsewhere(stream: Any, batch: ScheduledBatch) -> None:
    stream.break_off(Aborted("attach again", reason=SUPERSEDED))


@pytest.mark.parametrize(
    ("fault", "kind", "step_id"),
    [
        (_refuse, LossKind.REFUSED, 1),
        (_garble, LossKind.REFUSED, None),
        (_end, LossKind.BROKEN, None),
        (_crash, LossKind.BROKEN, None),
        (_shut_down, LossKind.LEFT, None),
        (_attach_elsewhere, LossKind.LEFT, None),
    ],
)
def test_a_stream_that_cannot_go_on_is_followed_by_another_attach(
    fault: Callable[..., None], kind: LossKind, step_id: int | None, run_async: RunAsync
) -> None:
    async def scenario() -> None:
        async with linked() as (worker, listener):
            report = await listener.hear("attached")
            stream = await worker.stream()
            await stream.heartbeat()  # has come: gRPC gives a stream whose write is cut off a status of its own
            fault(stream, listener.batch(report, 1))
            loss = await listener.hear("detached")
            assert (loss.kind, loss.step_id) == (kind, step_id)
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


def test_a_worker_that_finishes_a_long_batch_before_it_reports_is_waited_for(run_async: RunAsync) -> None:
    async def scenario() -> None:
        async with scripted_worker() as worker:
            worker.answers.clear()
            worker.beats_s = 0.02
            listener = Listener()
            running = asyncio.create_task(WorkerLink(worker.address, EPOCH, listener, 200).run())
            await worker.asked.wait()
            await asyncio.sleep(0.6)  # three times what is silence
            worker.answers.set()
            assert (await listener.hear("attached")).nonce == worker.num_attaches == 1
            running.cancel()
            await asyncio.wait((running,))

    run_async(scenario())


def test_a_pause_of_this_process_is_nobody_s_silence(run_async: RunAsync) -> None:
    async def scenario() -> None:
        async with linked(silence_ms=800) as (worker, listener):
            await listener.hear("attached")
            stream = await worker.stream()
            await stream.heartbeat()
            time.sleep(2.0)  # noqa: ASYNC251 - nothing runs meanwhile, as if the process were stopped
            stream.beat()
            await stream.heartbeat()
            assert worker.num_attaches == 1

    run_async(scenario())


def test_a_step_that_hangs_is_a_loss(run_async: RunAsync, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_clock, "UNMEASURED_US", 50_000)

    async def scenario() -> None:
        async with linked(silence_ms=400) as (worker, listener):
            report = await listener.hear("attached")
            stream = await worker.stream()
            listener.batch(report, 1)
            beating = asyncio.create_task(_beat(stream))
            loss = await listener.hear("detached")
            assert loss.kind is LossKind.BROKEN and "step 1 of 0 positions has taken" in loss.text
            beating.cancel()

    run_async(scenario())


async def _beat(stream: Any) -> None:
    while True:
        stream.beat()
        await asyncio.sleep(0.05)


def test_a_report_of_another_attach_is_not_taken(run_async: RunAsync) -> None:
    async def scenario() -> None:
        async with scripted_worker() as worker:
            worker.wrong_nonce = 1
            listener = Listener()
            running = asyncio.create_task(WorkerLink(worker.address, EPOCH, listener, PATIENT_MS).run())
            await worker.asked.wait()
            worker.wrong_nonce = 0
            assert (await listener.hear("attached")).nonce == 2
            running.cancel()
            await asyncio.wait((running,))

    run_async(scenario())


def test_a_later_leader_at_the_worker_ends_the_link(run_async: RunAsync) -> None:
    async def scenario() -> None:
        async with scripted_worker() as worker:
            worker.refuses = True
            with pytest.raises(OlderEpoch, match="older epoch") as older:
                await WorkerLink(worker.address, EPOCH, Listener(), PATIENT_MS).run()
            assert older.value.number == 7

    run_async(scenario())


@pytest.mark.parametrize("refuses", [True, False], ids=["it refuses us", "we refuse it"])
def test_a_worker_of_another_version_is_tried_again_and_deposes_nobody(run_async: RunAsync, refuses: bool) -> None:
    async def scenario() -> None:
        async with scripted_worker() as worker:
            if refuses:
                worker.refusal = FailedPrecondition("the scheduler speaks protocol 1", reason=VERSION_SKEW)
            else:
                worker.protocol = PROTOCOL_VERSION + 1
            listener = Listener()
            link = WorkerLink(worker.address, EPOCH, listener, PATIENT_MS)
            running = asyncio.create_task(link.run())
            while link._retry_s == RETRY_S:  # noqa: ASYNC110 - a refusal is no event of the link
                await asyncio.sleep(0.01)
            assert worker.num_attaches == refuses and not running.done()
            worker.refusal, worker.protocol = None, PROTOCOL_VERSION
            await listener.hear("attached")
            running.cancel()
            await asyncio.wait((running,))

    run_async(scenario())


def test_a_worker_that_refuses_again_and_again_is_tried_less_often(run_async: RunAsync) -> None:
    async def scenario() -> None:
        async with scripted_worker() as worker:
            listener = Listener()
            link = WorkerLink(worker.address, EPOCH, listener, PATIENT_MS)
            running = asyncio.create_task(link.run())
            pauses = []
            for step_id in (1, 2):
                report = await listener.hear("attached")
                (await worker.stream()).refuse(listener.batch(report, step_id).step_id, "no")
                await listener.hear("detached")
                pauses.append(link._retry_s)
            report = await listener.hear("attached")
            (await worker.stream()).answer(output_of(listener.batch(report, 3)))
            await listener.hear("output")
            await asyncio.sleep(0)
            assert pauses[0] < pauses[1] <= UNFIT_RETRY_S_MAX and link._retry_s == RETRY_S
            running.cancel()
            await asyncio.wait((running,))

    run_async(scenario())


def test_epochs_are_asked_all_at_once_within_a_bound(run_async: RunAsync) -> None:
    async def scenario() -> None:
        async with scripted_worker() as first, scripted_worker() as second, scripted_worker() as silent:
            first.fake.epoch = EPOCH
            silent.protocol = PROTOCOL_VERSION + 1  # counts all the same
            silent.fake.epoch = Epoch(9, b"n" * 16)
            asked = [first.address, second.address, silent.address, "127.0.0.1:1"]
            answers = await ask_epochs(asked, 5.0)
            assert answers == {first.address: EPOCH, second.address: NO_EPOCH, silent.address: Epoch(9, b"n" * 16)}

    run_async(scenario())


def test_a_retired_link_ends_with_its_stream(run_async: RunAsync) -> None:
    async def scenario() -> None:
        async with scripted_worker() as worker:
            listener = Listener()
            link = WorkerLink(worker.address, EPOCH, listener, PATIENT_MS)
            running = asyncio.create_task(link.run())
            report = await listener.hear("attached")
            stream = await worker.stream()
            link.retire()
            stream.answer(output_of(listener.batch(report, 1)))
            await listener.hear("output")  # it goes on for as long as the worker lives
            stream.break_off()
            await running
            assert worker.num_attaches == 1

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


def test_a_worker_that_leaves_is_heard_of_and_goes_on_answering(run_async: RunAsync) -> None:
    async def scenario() -> None:
        async with linked() as (worker, listener):
            report = await listener.hear("attached")
            stream = await worker.stream()
            stream.say(worker_pb2.ExecuteResponse(leaving=worker_pb2.Leaving()))
            await listener.hear("leaving")
            listener.batch(report, 1)
            assert (await stream.batch()).step_id == 1
            stream.break_off(Unavailable("the worker is shutting down", reason=NOT_SERVING, retry_after_ms=0))
            assert (await listener.hear("detached")).kind is LossKind.LEFT

    run_async(scenario())
