"""The links of one term as addresses come and go: workers join, leave with their stream, and flicker without harm."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from scripted_worker import ScriptedWorker, scripted_worker
from structlog.testing import CapturingLogger

from services.scheduler import worker_link, worker_links
from services.scheduler.core.worker_loss import WorkerLoss
from services.scheduler.worker_link import OlderEpoch
from services.scheduler.worker_links import WorkerLinks
from tessera.values.batch import ScheduledBatch, ScheduledBatchOutput
from tessera.values.identity import Epoch
from tessera.values.report import WorkerReport

RunAsync = Callable[..., Any]

EPOCH = Epoch(3, b"s" * 16)


class Hall:
    """The addresses that there are, as the test says, and all that is heard of the workers, in order."""

    def __init__(self) -> None:
        self._addresses: asyncio.Queue[frozenset[str]] = asyncio.Queue()
        self._events: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    def set_addresses(self, *workers: ScriptedWorker) -> None:
        self._addresses.put_nowait(frozenset(worker.address for worker in workers))

    async def addresses(self, targets: object) -> AsyncIterator[frozenset[str]]:
        while True:
            yield await self._addresses.get()

    def worker_attached(self, address: str, report: WorkerReport, send: Callable[[ScheduledBatch], None]) -> None:
        self._events.put_nowait(("attached", address))

    def worker_output(self, address: str, output: ScheduledBatchOutput) -> None:
        raise AssertionError("nothing was sent")

    def worker_detached(self, address: str, loss: WorkerLoss) -> None:
        self._events.put_nowait(("detached", address))

    def worker_removed(self, address: str) -> None:
        self._events.put_nowait(("removed", address))

    async def hear(self, *expected: tuple[str, ScriptedWorker]) -> None:
        """The next events, in any order."""
        heard = [await self._events.get() for _ in expected]
        assert sorted(heard) == sorted((kind, worker.address) for kind, worker in expected)


@asynccontextmanager
async def linked(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Hall]:
    hall = Hall()
    monkeypatch.setattr(worker_links, "addresses", hall.addresses)
    running = asyncio.create_task(WorkerLinks(("unused",), EPOCH, hall, 60_000).run())
    try:
        yield hall
    finally:
        running.cancel()
        await asyncio.wait((running,))
        assert running.cancelled(), running.exception()


def test_workers_join_and_leave_with_their_streams(run_async: RunAsync, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with scripted_worker() as one, scripted_worker() as two, linked(monkeypatch) as hall:
            hall.set_addresses(one)
            await hall.hear(("attached", one))
            hall.set_addresses(one, two)
            await hall.hear(("attached", two))
            hall.set_addresses(two)
            stream = await one.stream()
            await stream.heartbeat()
            await stream.heartbeat()  # its stream goes on
            stream.break_off()
            await hall.hear(("detached", one), ("removed", one))
            hall.set_addresses(one, two)
            await hall.hear(("attached", one))
            assert one.fake.nonce == 3, "nonces go on growing over all links of a term"

    run_async(scenario())


def test_an_address_that_flickers_costs_nothing(run_async: RunAsync, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with scripted_worker() as one, linked(monkeypatch) as hall:
            hall.set_addresses(one)
            await hall.hear(("attached", one))
            hall.set_addresses()
            hall.set_addresses(one)
            stream = await one.stream()
            await stream.heartbeat()
            stream.break_off()
            await hall.hear(("detached", one), ("attached", one))
            assert one.num_attaches == 2

    run_async(scenario())


def test_a_worker_that_never_came_is_given_up(run_async: RunAsync, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with scripted_worker() as one, linked(monkeypatch) as hall:
            nobody = ScriptedWorker()
            nobody.address = "127.0.0.1:1"
            hall.set_addresses(one, nobody)
            await hall.hear(("attached", one))
            hall.set_addresses(one)
            await hall.hear(("removed", nobody))

    run_async(scenario())


def test_a_later_leader_at_any_worker_ends_all_links(run_async: RunAsync, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        hall = Hall()
        monkeypatch.setattr(worker_links, "addresses", hall.addresses)
        async with scripted_worker() as one, scripted_worker() as two:
            two.refuses = True
            hall.set_addresses(one, two)
            with pytest.raises(OlderEpoch, match="older epoch"):
                await WorkerLinks(("unused",), EPOCH, hall, 60_000).run()

    run_async(scenario())


def test_a_worker_under_two_names_is_attached_under_one_and_both_are_said_once(
    run_async: RunAsync, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with scripted_worker() as one, linked(monkeypatch) as hall:
            hall.set_addresses(one)
            await hall.hear(("attached", one))
            again = one.address.replace("127.0.0.1", "localhost")
            hall._addresses.put_nowait(frozenset((one.address, again)))
            for _ in range(3):
                one.described.clear()
                await one.described.wait()
            (said,) = (call for call in log.calls if call.args[0] == "worker is not used")
            assert (said.method_name, said.kwargs["worker"]) == ("warning", again)
            assert f"attached as {one.address}:" in said.kwargs["reason"]
            assert one.num_attaches == 1
            (await one.stream()).break_off()
            await hall.hear(("detached", one))
            await hall._events.get()
            assert one.num_attaches == 2, "under either"

    log = CapturingLogger()
    monkeypatch.setattr(worker_link, "_log", log)
    monkeypatch.setattr(worker_link, "UNFIT_RETRY_S_MAX", 0.1)
    run_async(scenario())
