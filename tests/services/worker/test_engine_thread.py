"""The engine's thread: order, fences, poison, and what a bug does."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from worker_process import batch_of, leader

from model_worker.batch_refused import BatchRefused
from model_worker.joined_batch import can_join, joined
from services.worker import convert
from services.worker.config import WorkerConfig
from services.worker.engine_thread import EngineCrashed, EngineThread
from services.worker.loading import load_engine
from services.worker.main import serve
from services.worker.servicer import SERVICE_NAME
from tessera.values.batch import ScheduledBatch, ScheduledBatchOutput
from tessera.values.protocol import PROTOCOL_VERSION
from tessera.worker.v1 import worker_pb2, worker_pb2_grpc

UNDER = (leader(1), 1)


class ScriptedEngine:
    """An engine that records steps; `behaviours` says what a step does instead of returning its own number."""

    def __init__(self, behaviours: dict[int, Callable[[], Any]] | None = None) -> None:
        self.behaviours = behaviours or {}
        self.started: list[int] = []

    def execute(self, batch: ScheduledBatch, before_pass: Callable[[], None]) -> Any:
        self.started.append(batch.step_id)
        before_pass()
        return self.behaviours.get(batch.step_id, lambda: batch.step_id)()

    def joins(self, first: ScheduledBatch, second: ScheduledBatch) -> bool:
        return False


class Held:
    """A step that waits until the test lets it go."""

    def __init__(self) -> None:
        self.started, self.go = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.started.set()
        assert self.go.wait(30)
        return "held"

    async def wait_started(self) -> None:
        assert await asyncio.to_thread(self.started.wait, 30)


def submit(thread: EngineThread, told: list[Any], *steps: int) -> None:
    for step in steps:
        thread.submit(batch_of(UNDER, step), told.append)


def test_a_fence_waits_for_the_started_batch_and_forgets_the_rest(run_async: Any) -> None:
    async def story() -> None:
        held, told = Held(), list[Any]()
        engine = ScriptedEngine({1: held})
        thread = EngineThread(engine)
        submit(thread, told, 1, 2)
        await held.wait_started()
        fence = asyncio.create_task(thread.fence())
        await asyncio.sleep(0)
        submit(thread, told, 3)  # poisoned until the fence has been passed
        held.go.set()
        await fence
        assert told == ["held"], "told before the fence returned"
        answered = asyncio.Event()
        thread.submit(batch_of(UNDER, 4), lambda _outcome: answered.set())
        await answered.wait()
        assert engine.started == [1, 4]
        await thread.end()

    run_async(story())


def test_overlapping_fences_all_return(run_async: Any) -> None:
    async def story() -> None:
        held = Held()
        thread = EngineThread(ScriptedEngine({1: held}))
        submit(thread, [], 1)
        await held.wait_started()
        fences = [asyncio.create_task(thread.fence()) for _ in range(3)]
        await asyncio.sleep(0)
        held.go.set()
        await asyncio.gather(*fences)
        await thread.end()

    run_async(story())


def test_a_refusal_stops_what_is_queued_even_while_the_loop_is_busy(run_async: Any) -> None:
    refusing = threading.Event()

    def refuse() -> None:
        refusing.set()
        raise BatchRefused(1, "does not fit")

    async def story() -> None:
        told: list[Any] = []
        engine = ScriptedEngine({1: refuse})
        thread = EngineThread(engine)
        submit(thread, told, 1, 2, 3)  # the loop hears nothing before all three are submitted
        assert refusing.wait(30)
        await thread.fence()
        assert engine.started == [1] and [outcome.step_id for outcome in told] == [1]
        await thread.end()

    run_async(story())


def test_the_end_comes_after_the_started_batch_and_leaves_no_thread(run_async: Any) -> None:
    """A thread that were still inside torch when the interpreter ends would abort the process."""

    async def story() -> None:
        held, told = Held(), list[Any]()
        thread = EngineThread(ScriptedEngine({1: held}))
        submit(thread, told, 1, 2)
        await held.wait_started()
        end = asyncio.create_task(thread.end())
        await asyncio.sleep(0)
        assert not end.done()
        held.go.set()
        await end
        assert "engine" not in [running.name for running in threading.enumerate()]
        await asyncio.sleep(0)
        assert told == ["held"]

    run_async(story())


def test_a_bug_is_reported_and_ends_the_thread(run_async: Any) -> None:
    def crash() -> None:
        raise AssertionError("a broken invariant")

    async def story() -> None:
        thread = EngineThread(ScriptedEngine({1: crash}))
        submit(thread, [], 1)
        with pytest.raises(AssertionError, match="a broken invariant"):
            await thread.crashed

    run_async(story())


def test_a_fence_during_which_the_engine_crashes_does_not_wait_for_ever(run_async: Any) -> None:
    """As when a worker is to shut down: what ends it then is the crash."""
    started, go = threading.Event(), threading.Event()

    def crash() -> None:
        started.set()
        assert go.wait(30)
        raise AssertionError("a broken invariant")

    async def story() -> None:
        thread = EngineThread(ScriptedEngine({1: crash}))
        submit(thread, [], 1)
        assert await asyncio.to_thread(started.wait, 30)
        fence = asyncio.create_task(thread.fence())
        await asyncio.sleep(0)
        go.set()
        with pytest.raises(EngineCrashed):
            await fence
        with pytest.raises(AssertionError, match="a broken invariant"):
            await thread.crashed

    run_async(story())


class JoiningEngine(ScriptedEngine):
    """Answers with real outputs of one token a row; `refuses` the two together."""

    def __init__(self, held: Held, refuses: bool = False) -> None:
        super().__init__({1: held})
        self.refuses = refuses
        self.joined: list[tuple[int, int]] = []

    def execute(self, batch: ScheduledBatch, before_pass: Callable[[], None]) -> Any:
        super().execute(batch, before_pass)
        ones = np.ones(batch.num_rows, np.int32)
        return ScheduledBatchOutput(batch.epoch, batch.nonce, batch.step_id, ones, ones * batch.step_id, compute_us=7)

    joins = staticmethod(can_join)

    def execute_both(self, first: ScheduledBatch, second: ScheduledBatch, before_pass: Callable[[], None]) -> Any:
        if self.refuses:
            raise BatchRefused(second.step_id, "does not fit")
        self.joined.append((first.step_id, second.step_id))
        both = joined(first, second)
        return both, self.execute(both, before_pass)


def waiting_pair(thread: EngineThread, told: list[Any], done: asyncio.Event) -> None:
    """A batch that is held up, and behind it a decode and a prompt."""
    thread.submit(batch_of(UNDER, 1), told.append)
    thread.submit(batch_of(UNDER, 2, [(0, 1, 7)]), told.append)
    thread.submit(batch_of(UNDER, 3, [(1, 5, 5), (2, 4, 4)]), lambda outcome: (told.append(outcome), done.set()))


@pytest.mark.parametrize("refuses", [False, True])
def test_prompts_that_wait_behind_a_batch_join_it(run_async: Any, refuses: bool) -> None:
    """And go by themselves where the engine does not take them together."""

    async def story() -> None:
        held, told, done, noted = Held(), list[Any](), asyncio.Event(), list[int]()
        engine = JoiningEngine(held, refuses)
        thread = EngineThread(engine, [lambda batch, _outcome: noted.append(batch.num_rows)])
        waiting_pair(thread, told, done)
        await held.wait_started()
        held.go.set()
        await done.wait()
        assert engine.joined == ([] if refuses else [(2, 3)]) and noted == ([0, 1, 2] if refuses else [0, 3])
        outcomes = [(outcome.step_id, len(outcome.token_counts), outcome.compute_us) for outcome in told]
        assert outcomes == [(1, 0, 7), (2, 1, 7 if refuses else 0), (3, 2, 7)]
        await thread.end()

    run_async(story())


def test_a_fence_forgets_a_pair_that_waits_and_tells_of_one_that_runs(run_async: Any) -> None:
    async def story() -> None:
        for runs in (False, True):
            held, told, done = Held(), list[Any](), asyncio.Event()
            engine = JoiningEngine(held)
            if runs:
                engine.behaviours = {3: held}
            thread = EngineThread(engine)
            waiting_pair(thread, told, done)
            await held.wait_started()
            fence = asyncio.create_task(thread.fence())
            await asyncio.sleep(0)
            held.go.set()
            await fence
            assert [outcome.step_id for outcome in told] == ([1, 2, 3] if runs else [1])
            await thread.end()

    run_async(story())


def test_a_visit_comes_between_two_batches_and_forgets_none(run_async: Any) -> None:
    async def story() -> None:
        held, told, both = Held(), list[Any](), asyncio.Event()
        engine = ScriptedEngine({1: held})
        thread = EngineThread(engine)
        submit(thread, told, 1)
        thread.submit(batch_of(UNDER, 2), lambda outcome: (told.append(outcome), both.set()))
        await held.wait_started()
        visit = asyncio.create_task(thread.between_batches(lambda visited: list(visited.started)))
        await asyncio.sleep(0)
        held.go.set()
        assert await visit == [1]
        await both.wait()
        assert told == ["held", 2]
        await thread.end()

    run_async(story())


def test_an_outcome_is_told_while_the_next_batch_computes(run_async: Any) -> None:
    async def story() -> None:
        held, told = Held(), asyncio.Queue[Any]()
        thread = EngineThread(ScriptedEngine({2: held}))
        for step in (1, 2):
            thread.submit(batch_of(UNDER, step), told.put_nowait)
        assert await told.get() == 1 and not held.go.is_set()
        held.go.set()
        assert await told.get() == "held", "with nothing behind it, at once"
        await thread.end()

    run_async(story())


def test_nothing_is_told_between_the_end_of_a_batch_and_the_next_pass(run_async: Any) -> None:
    order: list[Any] = []

    class Ordered(ScriptedEngine):
        def execute(self, batch: ScheduledBatch, before_pass: Callable[[], None]) -> Any:
            order.append(f"prepare {batch.step_id}")
            before_pass()
            order.append(f"compute {batch.step_id}")
            return batch.step_id

    class Watched(EngineThread):
        def _call(self, function: Callable[[], None]) -> None:
            order.append("tell")
            super()._call(function)

    async def story() -> None:
        thread, told = Watched(Ordered()), asyncio.Queue[Any]()
        with thread._changed:  # both are there before either begins
            for step in (1, 2):
                thread.submit(batch_of(UNDER, step), told.put_nowait)
        assert [await told.get(), await told.get()] == [1, 2]
        assert order[:5] == ["prepare 1", "compute 1", "prepare 2", "tell", "compute 2"]
        await thread.end()

    run_async(story())


def test_a_bug_in_the_engine_ends_the_process(run_async: Any, tmp_path: Path) -> None:
    """Slots that a bug has touched must not be reported to anybody; another boot starts without them."""

    def load(config: WorkerConfig) -> Any:
        engine = load_engine(config)

        def execute(_batch: ScheduledBatch, _before_pass: Callable[[], None]) -> None:
            raise AssertionError("a broken invariant")

        engine.execute = execute
        return engine

    async def command() -> None:
        async with grpc.aio.insecure_channel(f"unix:{tmp_path}/socket") as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            watch = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(service=SERVICE_NAME), wait_for_ready=True
            )
            while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
                pass
            epoch = convert.epoch_to_proto(UNDER[0])
            attach = stub.Attach(worker_pb2.AttachRequest(epoch=epoch, nonce=1, protocol=PROTOCOL_VERSION))
            assert len([part async for part in attach]) == 2
            execution = stub.Execute()
            await execution.write(worker_pb2.ExecuteRequest(batch=convert.batch_to_proto(batch_of(UNDER, 1))))
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                while response := await execution.read():
                    assert response.WhichOneof("message") == "heartbeat"
            assert ended.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)

    async def story() -> None:
        config = WorkerConfig(
            model="deterministic",
            listen=f"unix:{tmp_path}/socket",
            kv_cache_bytes=1 << 16,
            threads=1,
        )
        commanding = asyncio.create_task(command())
        with pytest.raises(AssertionError, match="a broken invariant"):
            await serve(config, load)
        await commanding

    run_async(story())
