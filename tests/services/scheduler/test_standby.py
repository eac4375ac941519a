"""A standby between a store, a clock and workers: when it takes which epoch, and what it says meanwhile."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from scripted_worker import scripted_worker
from structlog.testing import CapturingLogger

from services.scheduler import standby
from services.scheduler.config import SchedulerConfig
from services.scheduler.core.journal_call import BeginRewrite, EndRewrite, Failed, Generation
from services.scheduler.standby import EpochTake, Standby
from services.scheduler.store.memory import MemoryStore
from services.scheduler.store.port import LookReply, TakeReply
from tessera.values.identity import NO_EPOCH, Epoch

RunAsync = Callable[..., Any]

LEASE_MS = 2000
OTHERS = Epoch(4, b"o" * 16)


class WatchedStore(MemoryStore):
    """A store on a clock of its own, at which each look of a standby is a tenth of a second later; `looks` counts them."""

    def __init__(self) -> None:
        super().__init__(lambda: self.clock_us / 1000)
        self.clock_us = 0
        self.looks = 0
        self.looked: Callable[[], None] = lambda: None
        self.loses_answer = False

    async def look(self) -> LookReply:
        self.looks += 1
        self.clock_us += 100_000
        self.looked()
        return await super().look()

    async def take_epoch(self, expected: Epoch, new: Epoch, lease_ms: int) -> TakeReply:
        reply = await super().take_epoch(expected, new, lease_ms)
        if self.loses_answer:
            self.loses_answer = False
            return Failed("no answer")
        return reply

    def fill(self, epoch: Epoch) -> None:
        """Some leader has written here under `epoch`."""
        for call in (BeginRewrite(Generation(epoch.number, 1)), EndRewrite(Generation(epoch.number, 1), 1)):
            self.execute(epoch, call)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> WatchedStore:
    """Nothing here waits for a real clock."""
    made = WatchedStore()
    monkeypatch.setattr(standby, "POLL_S", 0.0)
    monkeypatch.setattr(standby, "WRONG_FORMAT_RETRY_S", 0.0)
    monkeypatch.setattr(standby, "boot_us", lambda: made.clock_us)
    return made


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> CapturingLogger:
    logger = CapturingLogger()
    monkeypatch.setattr(standby, "_log", logger)
    return logger


@asynccontextmanager
async def standing_by(store: WatchedStore, worker: str, **about: Any) -> AsyncIterator["asyncio.Task[EpochTake]"]:
    config = SchedulerConfig(workers=(worker,), redis_url="redis://unused", lease_ms=LEASE_MS)
    taking = asyncio.create_task(Standby(config, store, **about).take())
    try:
        yield taking
    finally:
        taking.cancel()
        await asyncio.wait((taking,))


async def looked(store: WatchedStore, times: int) -> None:
    """Wait until it has looked so often again."""
    enough, until = asyncio.Event(), store.looks + times
    store.looked = lambda: enough.set() if store.looks >= until else None
    await enough.wait()


def test_an_empty_store_is_taken_after_two_leases(run_async: RunAsync, store: WatchedStore) -> None:
    async def scenario() -> None:
        async with scripted_worker() as worker, standing_by(store, worker.address) as taking:
            taken = await taking
            assert (taken.epoch, taken.workers) == (store.epoch, {worker.address})
            assert taken.epoch.number == 1 and store.looks == 1 + 2 * LEASE_MS // 100

    run_async(scenario())


def test_a_first_start_says_once_what_it_waits_for_and_how_long(
    run_async: RunAsync, store: WatchedStore, log: CapturingLogger
) -> None:
    async def scenario() -> None:
        async with scripted_worker() as worker, standing_by(store, worker.address) as taking:
            await taking
        waits, taken = log.calls
        assert (waits.method_name, waits.args) == ("info", ("redis is empty: waiting for a leader that it may have lost",))
        assert waits.kwargs == {"wait_ms": 2 * LEASE_MS}
        assert taken.args == ("epoch taken",)

    run_async(scenario())


def test_a_held_lease_is_waited_for_and_said_once(run_async: RunAsync, store: WatchedStore, log: CapturingLogger) -> None:
    async def scenario() -> None:
        store.fill(OTHERS)
        await store.renew(OTHERS, LEASE_MS)
        async with scripted_worker() as worker, standing_by(store, worker.address) as taking:
            assert (await taking).epoch.number == 5
            assert store.looks == LEASE_MS // 100
        assert [call.args[0] for call in log.calls] == ["standing by", "epoch taken"]

    run_async(scenario())


def test_a_released_lease_is_taken_at_once(run_async: RunAsync, store: WatchedStore) -> None:
    async def scenario() -> None:
        store.fill(OTHERS)
        await store.renew(OTHERS, LEASE_MS)
        async with scripted_worker() as worker, standing_by(store, worker.address) as taking:
            await looked(store, 3)
            await store.release(OTHERS)
            await taking
            assert store.looks <= 4

    run_async(scenario())


def test_the_epoch_is_above_what_store_and_worker_hold_and_what_was_told(run_async: RunAsync, store: WatchedStore) -> None:
    async def scenario() -> None:
        store.fill(OTHERS)
        async with scripted_worker() as worker:
            worker.fake.epoch = Epoch(7, b"w" * 16)
            async with standing_by(store, worker.address) as taking:
                assert (await taking).epoch.number == 8
            await store.release(store.epoch)
            async with standing_by(store, worker.address, told=11) as taking:
                assert (await taking).epoch.number == 12

    run_async(scenario())


def test_its_own_lease_keeps_it_waiting_for_nothing(run_async: RunAsync, store: WatchedStore) -> None:
    async def scenario() -> None:
        store.fill(OTHERS)
        await store.renew(OTHERS, LEASE_MS)
        async with scripted_worker() as worker, standing_by(store, worker.address, told=9, mine=OTHERS) as taking:
            assert (await taking).epoch.number == 10
            assert store.looks == 1

    run_async(scenario())


def test_a_lost_answer_costs_no_lease(run_async: RunAsync, store: WatchedStore) -> None:
    async def scenario() -> None:
        store.fill(OTHERS)
        store.loses_answer = True
        async with scripted_worker() as worker, standing_by(store, worker.address) as taking:
            taken = await taking
            assert taken.epoch == store.epoch and store.looks == 2, "it waited for its own lease"

    run_async(scenario())


def test_nothing_is_taken_before_a_worker_answers(run_async: RunAsync, store: WatchedStore, log: CapturingLogger) -> None:
    async def scenario() -> None:
        store.fill(OTHERS)
        async with scripted_worker() as worker:
            nobody = f"{worker.address.rpartition(':')[0]}:1"
            async with standing_by(store, nobody) as taking:
                await looked(store, 3)
                assert not taking.done() and store.epoch == OTHERS
        assert [call.args[0] for call in log.calls] == ["waiting for a worker"]

    run_async(scenario())


@pytest.mark.parametrize("trouble", ["away", "another format"])
def test_a_store_that_cannot_be_read_is_waited_for_and_said_once(
    trouble: str, run_async: RunAsync, store: WatchedStore, log: CapturingLogger
) -> None:
    async def scenario() -> None:
        store.fill(OTHERS)
        store.failing, fit = trouble == "away", store.format
        store.format = fit if store.failing else "999"
        async with scripted_worker() as worker, standing_by(store, worker.address) as taking:
            await looked(store, 5)
            assert not taking.done() and store.epoch == OTHERS != NO_EPOCH
            store.failing, store.format = False, fit
            before = store.looks
            await taking
            assert store.looks - before >= LEASE_MS // 100, "its leader had no time to renew"
        said = [call.args[0] for call in log.calls]
        assert said == ["waiting for redis", "redis answers", "epoch taken"]
        assert trouble == "away" or "format 999" in log.calls[0].kwargs["error"]

    run_async(scenario())


def test_a_standby_that_cannot_follow_its_workers_ends(
    run_async: RunAsync, store: WatchedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(_targets: object) -> AsyncIterator[frozenset[str]]:
        yield frozenset()
        raise ZeroDivisionError

    async def scenario() -> None:
        monkeypatch.setattr(standby, "addresses", broken)
        async with standing_by(store, "unused:1") as taking:
            with pytest.raises(ExceptionGroup) as raised:
                await taking
            assert raised.group_contains(ZeroDivisionError)

    run_async(scenario())
