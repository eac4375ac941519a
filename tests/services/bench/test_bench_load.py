"""Loops of load: who is sent when, how many at once, and how they end. The requests here end when a test says."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from outcomes import answered, failed

from services.bench.load import Load
from services.bench.outcome import INTERRUPTED, Outcome
from services.bench.workload import PlannedRequest, WorkloadError

RunAsync = Callable[[Coroutine[Any, Any, Any]], Any]


class Desk:
    """Answers each request after `turns` turns of the event loop, or never. `full` is set once `room` are under way, `empty` once none is
    again. With `fails` there is no answer."""

    def __init__(self, turns: int | None = 3, room: int = 0, fails: bool = False) -> None:
        self.fails = fails
        self.full, self.empty = asyncio.Event(), asyncio.Event()
        self.room = room
        self.asked: list[tuple[int, float | None]] = []
        self.running = self.running_peak = 0
        self.cancelled: list[int] = []
        self.turns = turns

    async def __call__(self, request: PlannedRequest, arrival_s: float | None) -> Outcome:
        self.asked.append((request.index, arrival_s))
        self.running += 1
        self.running_peak = max(self.running_peak, self.running)
        if self.running == self.room:
            self.full.set()
        sent_s = time.monotonic()
        try:
            if self.turns is None:
                await asyncio.Event().wait()
            for _ in range(self.turns or 0):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled.append(request.index)
            raise
        finally:
            self.running -= 1
            if self.running == 0:
                self.empty.set()
        if self.fails:
            return failed(request.index, sent_s, time.monotonic(), "UNAVAILABLE")
        return answered(request.index, sent_s, [time.monotonic()])


def plan(count: int, gap_s: float | None = None) -> Iterator[PlannedRequest]:
    return iter([PlannedRequest(index, 1, 1, None if gap_s is None else index * gap_s) for index in range(count)])


@pytest.mark.parametrize("concurrency", [1, 3, 50])
def test_a_closed_loop_has_so_many_under_way(run_async: RunAsync, concurrency: int) -> None:
    desk = Desk()
    load = Load(desk, concurrency)
    run_async(load.run(plan(20), asyncio.Event()))
    assert desk.running_peak == min(concurrency, 20)
    assert sorted(outcome.index for outcome in load.outcomes) == list(range(20)) and load.num_running == 0
    assert desk.asked == [(index, None) for index in range(20)]


def test_an_open_loop_sends_at_its_times_whatever_is_answered(run_async: RunAsync) -> None:
    desk = Desk(turns=None, room=5)
    load = Load(desk, None)

    async def story() -> None:
        stop = asyncio.Event()
        running = asyncio.create_task(load.run(plan(5, gap_s=0.01), stop))
        await desk.full.wait()
        stop.set()
        await running

    run_async(story())
    assert desk.asked == [(index, load.began_s + 0.01 * index) for index in range(5)]
    assert sorted(desk.cancelled) == list(range(5)) and load.num_running == 0
    told = {item.index: (item.status, item.arrival_s) for item in load.outcomes}
    assert told == {index: (INTERRUPTED, load.began_s + 0.01 * index) for index in range(5)}
    assert all(item.end_s >= item.sent_s >= load.began_s for item in load.outcomes)


def test_no_request_of_an_open_loop_is_early(run_async: RunAsync) -> None:
    load = Load(Desk(), None)
    run_async(load.run(plan(10, gap_s=0.003), asyncio.Event()))
    due_s = [load.began_s + 0.003 * index for index in range(10)]
    assert all(outcome.sent_s >= due_s[outcome.index] - 1e-6 for outcome in load.outcomes) and len(load.outcomes) == 10


def test_after_the_duration_an_open_loop_sends_nothing_and_waits_for_the_rest(run_async: RunAsync) -> None:
    desk = Desk(turns=200)
    load = Load(desk, None, duration_s=0.02, clock=lambda: 7.0)
    run_async(load.run(plan(100, gap_s=0.005), asyncio.Event()))
    assert [index for index, _ in desk.asked] == [0, 1, 2, 3, 4] and len(load.outcomes) == 5


def test_the_clock_ends_an_open_loop_that_is_behind_its_plan(run_async: RunAsync) -> None:
    desk, now_s = Desk(), 0.0
    load = Load(desk, None, duration_s=1.0, clock=lambda: now_s)

    def late() -> Iterator[PlannedRequest]:
        nonlocal now_s
        for index in range(100):
            now_s = index * 0.25
            yield PlannedRequest(index, 1, 1, index * 1e-9)

    run_async(load.run(late(), asyncio.Event()))
    assert [index for index, _ in desk.asked] == [0, 1, 2, 3, 4] and len(load.outcomes) == 5


def test_after_the_duration_a_closed_loop_sends_nothing(run_async: RunAsync) -> None:
    desk = Desk()
    load = Load(desk, 2, duration_s=1e-9)
    run_async(load.run(plan(100), asyncio.Event()))
    assert len(desk.asked) == 2 == len(load.outcomes)


def test_a_closed_loop_pauses_where_a_request_failed(run_async: RunAsync, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.bench.load.FAILURE_PAUSE_S", 1e6)
    desk = Desk(fails=True)

    async def story() -> None:
        stop = asyncio.Event()
        running = asyncio.create_task(Load(desk, 2).run(plan(100), stop))
        await desk.empty.wait()
        for _ in range(50):
            await asyncio.sleep(0)
        stop.set()
        await running

    run_async(story())
    assert [index for index, _ in desk.asked] == [0, 1]


def test_stopping_keeps_what_is_finished(run_async: RunAsync) -> None:
    stop = asyncio.Event()
    desk = Desk()
    load = Load(desk, 2)

    async def ask(request: PlannedRequest, arrival_s: float | None) -> Outcome:
        if request.index == 6:
            stop.set()
            desk.turns = None
        return await desk(request, arrival_s)

    load.ask = ask
    run_async(load.run(plan(100), stop))
    assert sorted(outcome.index for outcome in load.outcomes) == [index for index, _ in desk.asked] and len(desk.asked) < 10
    interrupted = [outcome.index for outcome in load.outcomes if outcome.is_interrupted]
    assert len(load.outcomes) - len(interrupted) >= 5 and interrupted == desk.cancelled and interrupted


@pytest.mark.parametrize("concurrency", [4, None])
def test_a_plan_that_fails_ends_the_load_with_its_own_error(run_async: RunAsync, concurrency: int | None) -> None:
    def broken() -> Iterator[PlannedRequest]:
        yield PlannedRequest(0, 1, 1, 0.0)
        raise WorkloadError("none fits")

    with pytest.raises(WorkloadError, match="none fits"):
        run_async(Load(Desk(), concurrency).run(broken(), asyncio.Event()))


def test_a_load_that_is_cancelled_leaves_nothing_under_way(run_async: RunAsync) -> None:
    desk = Desk(turns=None, room=3)

    async def story() -> None:
        running = asyncio.create_task(Load(desk, 3).run(plan(9), asyncio.Event()))
        await desk.full.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await desk.empty.wait()

    run_async(story())
    assert sorted(desk.cancelled) == [0, 1, 2]
