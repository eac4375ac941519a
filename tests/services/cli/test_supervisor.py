"""The supervisor starts parts together, brings back what dies, gives up in the end, and stops in order."""

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from services.cli.child import Child, PartDied
from services.cli.supervisor import RestartPolicy, Supervisor

RunAsync = Callable[..., Any]
QUICK = RestartPolicy(first_delay_s=0.01, delay_s_max=0.02, tries_max=3)


class Report(list[str]):
    """Collects report lines; `line` waits for one that contains a text."""

    def __init__(self) -> None:
        super().__init__()
        self._more = asyncio.Condition()

    def __call__(self, text: str) -> None:
        self.append(text)
        asyncio.get_running_loop().create_task(self._wake())

    async def _wake(self) -> None:
        async with self._more:
            self._more.notify_all()

    async def line(self, text: str) -> str:
        async with self._more:
            await self._more.wait_for(lambda: any(text in line for line in self))
        return next(line for line in self if text in line)


def pid_in(line: str) -> int:
    return int(line.rpartition("pid:")[2])


def test_all_parts_become_ready_and_stop_in_the_given_order(run_async: RunAsync, make_spec: Callable[..., Any]) -> None:
    class Recorded(Child):
        async def stop(self, grace_s: float) -> None:
            stopped.append(self.name)
            await super().stop(grace_s)

    stopped: list[str] = []

    async def story() -> None:
        report = Report()
        supervisor = Supervisor([Recorded(make_spec(name, "serves")) for name in ("gateway", "scheduler", "worker")], report)
        await supervisor.start()
        pids = [pid_in(line) for line in report]
        assert len(pids) == 3
        await supervisor.stop(grace_s=10.0)
        assert not any(psutil.pid_exists(pid) for pid in pids)

    run_async(story())
    assert stopped == ["gateway", "scheduler", "worker"]


def test_a_part_that_dies_at_the_start_fails_the_start(run_async: RunAsync, make_spec: Callable[..., Any]) -> None:
    async def story() -> None:
        parts = [Child(make_spec("gateway", "never ready")), Child(make_spec("worker", "dies before it is ready"))]
        supervisor = Supervisor(parts, Report())
        before = set(psutil.Process().children())
        with pytest.raises(PartDied, match="weights are missing"):
            await supervisor.start()
        await supervisor.stop(grace_s=10.0)
        assert set(psutil.Process().children()) <= before

    run_async(story())


def test_a_killed_part_comes_back(run_async: RunAsync, make_spec: Callable[..., Any]) -> None:
    async def story() -> None:
        report = Report()
        supervisor = Supervisor([Child(make_spec("worker", "serves"))], report, QUICK)
        await supervisor.start()
        keeper = asyncio.create_task(supervisor.keep())
        first = pid_in(report[0])
        os.kill(first, signal.SIGKILL)
        second = pid_in(await report.line("is back"))
        assert second != first and psutil.pid_exists(second)
        assert "killed by signal 9" in await report.line("starting it again")
        keeper.cancel()
        await supervisor.stop(grace_s=10.0)
        assert not psutil.pid_exists(second)

    run_async(story())


def test_a_part_that_keeps_dying_ends_it_all(run_async: RunAsync, make_spec: Callable[..., Any]) -> None:
    async def story() -> None:
        report = Report()
        supervisor = Supervisor([Child(make_spec("worker", "dies once ready"))], report, QUICK)
        await supervisor.start()
        with pytest.raises(PartDied, match="ended with status 4"):
            await supervisor.keep()
        assert sum("starting it again" in line for line in report) == QUICK.tries_max
        await supervisor.stop(grace_s=10.0)

    run_async(story())


def test_a_cancelled_stop_still_leaves_no_process(run_async: RunAsync, make_spec: Callable[..., Any]) -> None:
    async def story() -> None:
        report = Report()
        supervisor = Supervisor([Child(make_spec(name, "ignores SIGTERM")) for name in ("gateway", "worker")], report)
        await supervisor.start()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await supervisor.stop(grace_s=600.0)
        for line in report:
            with pytest.raises(psutil.NoSuchProcess):
                psutil.Process(pid_in(line)).wait(timeout=10)
                psutil.Process(pid_in(line))

    run_async(story())
