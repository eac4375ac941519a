"""The journal pump between an owner that decides and a store that answers when the test says."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from structlog.testing import CapturingLogger

from services.scheduler import journal_pump
from services.scheduler.clock import now_us
from services.scheduler.core.journal_call import Applied, BeginRewrite, Failed, Generation, JournalCall, JournalReply
from services.scheduler.journal_pump import JournalPump
from services.scheduler.store.memory import MemoryStore
from tessera.values.identity import Epoch

RunAsync = Callable[..., Any]

EPOCH = Epoch(1, b"e" * 16)


class Table:
    """Owner and store in one: `calls` are still to be made, `made` were, `replies` are still to come. Nothing may overlap."""

    def __init__(self) -> None:
        self.calls: list[JournalCall] = []
        self.made: asyncio.Queue[JournalCall] = asyncio.Queue()
        self.replies: asyncio.Queue[JournalReply] = asyncio.Queue()
        self.heard: asyncio.Queue[JournalReply] = asyncio.Queue()
        self.wake_us: Callable[[], int | None] = lambda: None
        self.is_busy = False

    def next_journal_call(self) -> JournalCall | None:
        assert not self.is_busy
        return self.calls.pop(0) if self.calls else None

    def journal_replied(self, reply: JournalReply) -> None:
        self.heard.put_nowait(reply)

    def journal_wake_us(self) -> int | None:
        return self.wake_us()

    async def call(self, epoch: Epoch, call: JournalCall) -> JournalReply:
        assert epoch == EPOCH
        self.is_busy = True
        self.made.put_nowait(call)
        reply = await self.replies.get()
        self.is_busy = False
        return reply


class TableStore(MemoryStore):
    """A store whose calls the table answers."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.call = table.call  # type: ignore[method-assign]


def rewrite(counter: int) -> BeginRewrite:
    return BeginRewrite(Generation(1, counter))


def play(run_async: RunAsync, story: Callable[[Table, JournalPump], Any]) -> None:
    """Run `story` beside a pump."""

    async def scenario() -> None:
        table = Table()
        pump = JournalPump(TableStore(table), EPOCH, table)
        running = asyncio.create_task(pump.run())
        await story(table, pump)
        running.cancel()
        await asyncio.wait((running,))
        assert running.cancelled(), running.exception()

    run_async(scenario())


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing happens by itself: whoever forgets to wake the pump waits for ever."""
    monkeypatch.setattr(journal_pump, "IDLE_WAIT_S", 3600.0)


def test_a_woken_pump_makes_the_next_call(run_async: RunAsync) -> None:
    async def story(table: Table, pump: JournalPump) -> None:
        await asyncio.sleep(0)  # it sleeps
        table.calls = [rewrite(1)]
        pump.wake()
        assert await table.made.get() == rewrite(1)

    play(run_async, story)


def test_calls_go_one_after_the_other(run_async: RunAsync) -> None:
    async def story(table: Table, pump: JournalPump) -> None:
        table.calls = [rewrite(1), rewrite(2)]
        pump.wake()
        await table.made.get()
        await asyncio.sleep(0.01)
        assert table.made.empty(), "two calls at once"
        table.replies.put_nowait(Applied(0))
        assert await table.heard.get() == Applied(0)
        assert await table.made.get() == rewrite(2)

    play(run_async, story)


def test_a_wake_while_the_store_is_busy_is_not_lost(run_async: RunAsync) -> None:
    async def story(table: Table, pump: JournalPump) -> None:
        table.calls = [rewrite(1)]
        pump.wake()
        await table.made.get()
        table.calls = [rewrite(2)]
        pump.wake()
        table.replies.put_nowait(Applied(0))
        assert await table.made.get() == rewrite(2)

    play(run_async, story)


def test_a_retry_comes_when_its_time_has_come(run_async: RunAsync) -> None:
    async def story(table: Table, pump: JournalPump) -> None:
        due_us = now_us() + 50_000
        table.wake_us = lambda: due_us if now_us() < due_us else None
        pump.wake()
        await asyncio.sleep(0)
        table.calls = [rewrite(1)]  # and nobody wakes it
        await table.made.get()
        assert now_us() >= due_us

    play(run_async, story)


def test_a_failing_store_is_said_once_and_so_is_its_return(run_async: RunAsync, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(table: Table, pump: JournalPump) -> None:
        replies: list[JournalReply] = [Failed("away"), Failed("away"), Applied(0), Applied(0)]
        table.calls = [rewrite(counter) for counter in range(len(replies))]
        for reply in replies:
            table.replies.put_nowait(reply)
        pump.wake()
        for reply in replies:
            assert await table.heard.get() == reply
        assert [call.args[0] for call in log.calls] == ["journal is not written", "journal is written again"]

    log = CapturingLogger()
    monkeypatch.setattr(journal_pump, "_log", log)
    play(run_async, story)
