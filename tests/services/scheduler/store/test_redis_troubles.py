"""Every trouble of a real server, seen by a leader: each call answers in time, nothing is called written that is not, and it recovers."""

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from journal_leader import EPOCH, LEASE_MS, Leader, request

from services.scheduler.core.changes import Changes
from services.scheduler.core.journal import Journal
from services.scheduler.core.journal_call import Applied, Failed, Gap
from services.scheduler.store.embedded_redis import EmbeddedRedis
from services.scheduler.store.port import EpochTaken, LeaseView, Released, Renewed
from services.scheduler.store.resp_connection import RespConnection, read_url
from tessera.values.config import Config
from tessera.values.identity import NO_EPOCH, Epoch

RunAsync = Callable[..., Any]
LATER = Epoch(2, b"later" + bytes(11))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path) as running:
        yield running


async def order(server: EmbeddedRedis, *args: str | int) -> Any:
    """What an operator does to the server, on a connection of its own."""
    connection = await RespConnection.open(read_url(server.url), 10.0)
    try:
        return await connection.command(*args)
    finally:
        connection.close()


async def recovered(leader: Leader) -> None:
    """Drive the journal until the store has everything, and renew the lease until it answers."""
    while leader.journal.acked < leader.journal.last_record:
        if isinstance(await leader.drive(), Failed):
            await asyncio.sleep(0.02)
    while isinstance(await leader.store.renew(EPOCH, LEASE_MS), Failed):  # noqa: ASYNC110 - no event tells
        await asyncio.sleep(0.02)
    assert leader.journal.is_durable(0)


def test_a_paused_server_answers_no_call_and_all_of_them_in_time(server: EmbeddedRedis, run_async: RunAsync) -> None:
    async def scenario() -> None:
        leader = Leader(server.url, timeout_s=0.2)
        await leader.begin()
        assert await leader.store.renew(EPOCH, LEASE_MS) == Renewed()
        leader.journal.add(Changes((request(2),)), 0)
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        try:
            calls: list[Callable[[], Awaitable[Any]]] = [
                leader.store.look,
                lambda: leader.store.take_epoch(EPOCH, LATER, LEASE_MS),
                lambda: leader.store.renew(EPOCH, LEASE_MS),
                lambda: leader.store.release(EPOCH),
                lambda: leader.store.read(EPOCH),
                leader.drive,
            ]
            for call in calls * 2:
                began_s = time.monotonic()
                reply = await call()
                assert isinstance(reply, Failed) and time.monotonic() - began_s < 3.0, reply
                assert leader.journal.acked == 1
        finally:
            os.kill(server.pid, signal.SIGCONT)
        # What it was asked while it was paused it may do when it goes on: one of that was to take the epoch.
        while not isinstance(view := await leader.store.look(), LeaseView):  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.02)
        assert view.epoch in (EPOCH, LATER)
        await leader.store.close()

    run_async(scenario())


def test_journal_and_lease_do_not_wait_for_each_other(server: EmbeddedRedis, run_async: RunAsync) -> None:
    """A write of megabytes, or a read, must not cost the lease."""

    async def scenario() -> None:
        leader = Leader(server.url)
        await leader.begin()
        leader.journal.add(Changes((request(2),)), 0)
        call = leader.journal.next_call(0)
        assert call is not None
        journal, lease = leader.store._journal, leader.store._lease
        assert (await leader.store.call(EPOCH, call), await leader.store.renew(EPOCH, LEASE_MS)) == (Applied(2), Renewed())
        assert journal._connection is not lease._connection
        blocked = asyncio.ensure_future(journal.command("BLPOP", "nobody", 0))
        assert await leader.store.renew(EPOCH, LEASE_MS) == Renewed()
        assert not blocked.done()
        blocked.cancel()
        await leader.store.close()

    run_async(scenario())


def test_a_cut_connection_fails_one_call_and_is_opened_again(server: EmbeddedRedis, run_async: RunAsync) -> None:
    async def scenario() -> None:
        leader = Leader(server.url)
        await leader.begin()
        await leader.store.renew(EPOCH, LEASE_MS)
        for number in range(2, 6):
            await order(server, "CLIENT", "KILL", "TYPE", "normal")
            leader.journal.add(Changes((request(number),)), 0)
            await recovered(leader)
        assert await leader.requests() == set(range(1, 6))
        await leader.store.close()

    run_async(scenario())


def test_a_read_that_is_cut_off_is_a_failure_and_not_half_a_state(
    server: EmbeddedRedis, run_async: RunAsync, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Going on elsewhere could join the halves of two states: the server may have been restarted, or be another one."""

    async def scenario() -> None:
        leader = Leader(server.url)
        await leader.begin()
        await leader.write(Changes(tuple(request(number, 2000) for number in range(2, 800))))
        everything = set(range(1, 800))
        command, cuts = RespConnection.command, 0

        async def cutting(connection: RespConnection, *args: bytes | str | int) -> Any:
            nonlocal cuts
            if args[0] == "HSCAN" and args[2] != b"0" and not cuts:
                cuts += 1
                await order(server, "CLIENT", "KILL", "TYPE", "normal")
            return await command(connection, *args)

        monkeypatch.setattr(RespConnection, "command", cutting)
        assert isinstance(await leader.store.read(EPOCH), Failed) and cuts == 1
        assert await leader.requests() == everything
        await leader.store.close()

    run_async(scenario())


def test_a_server_that_is_loading_its_file_is_waited_for(tmp_path: Path, run_async: RunAsync) -> None:
    class SlowLoader(EmbeddedRedis):
        """Loads a command of its file in 0.1 ms, and `start` does not wait for it."""

        def _command(self, binary: Path) -> list[str]:
            return [*super()._command(binary), "--key-load-delay", "100"]

        def _wait_ready(self, deadline_s: float) -> None:
            pass

    async def fill(server: EmbeddedRedis) -> None:
        leader = Leader(server.url)
        await leader.begin()
        connection = await RespConnection.open(read_url(server.url), 30.0)
        await asyncio.gather(*(connection.command("SET", "filling", number) for number in range(15_000)))
        connection.close()
        await leader.store.close()

    async def scenario(server: EmbeddedRedis) -> None:
        leader = Leader(server.url, timeout_s=5.0)
        whys = []
        while not isinstance(view := await leader.store.look(), LeaseView):
            assert isinstance(view, Failed)
            whys.append(view.why)
            await asyncio.sleep(0.02)
        assert any("LOADING" in why for why in whys), whys
        assert view.epoch == EPOCH and await leader.requests() == {1}
        await leader.store.close()

    with EmbeddedRedis(tmp_path) as first:
        run_async(fill(first))
    with SlowLoader(tmp_path) as second:
        run_async(scenario(second))


def test_a_server_that_comes_back_with_an_older_file_is_brought_up_to_date(
    server: EmbeddedRedis, tmp_path: Path, run_async: RunAsync
) -> None:
    file, older = tmp_path / "appendonly.aof", tmp_path / "older.aof"

    async def before() -> Leader:
        await order(server, "CONFIG", "SET", "appendfsync", "always")  # else the file may be behind the answer
        leader = Leader(server.url)
        await leader.begin()
        shutil.copy(file, older)
        assert await leader.write(Changes((request(2), request(3)))) == Applied(2)
        return leader

    async def after(leader: Leader) -> None:
        leader.journal.add(Changes((request(4),), forgotten=(request(2).request_id,)), 0)
        call = leader.journal.next_call(2**60)
        assert call is not None
        reply = await leader.store.call(EPOCH, call)
        while isinstance(reply, Failed):
            reply = await leader.store.call(EPOCH, call)
        assert reply == Gap(1)
        leader.journal.on_reply(reply, 0)
        assert not leader.journal.is_durable(0), "what was acknowledged is gone"
        await recovered(leader)
        assert await leader.requests() == {1, 3, 4}
        await leader.store.close()

    leader = run_async(before())
    server.kill()
    shutil.copy(older, file)
    server.start()
    run_async(after(leader))


def test_a_server_that_comes_back_without_its_file_gets_everything_again(
    server: EmbeddedRedis, tmp_path: Path, run_async: RunAsync
) -> None:
    async def before() -> Leader:
        leader = Leader(server.url)
        await leader.begin()
        return leader

    async def after(leader: Leader) -> None:
        while isinstance(view := await leader.store.look(), Failed):
            pass
        assert view == LeaseView(NO_EPOCH, is_held=False, is_empty=True)
        leader.journal.add(Changes((request(2),)), 0)
        await recovered(leader)
        assert await leader.requests() == {1, 2}
        assert await leader.store.look() == LeaseView(EPOCH, is_held=True, is_empty=False)
        await leader.store.close()

    leader = run_async(before())
    server.kill()
    (tmp_path / "appendonly.aof").unlink()
    server.start()
    run_async(after(leader))


def test_a_server_that_fills_up_in_a_rewrite_is_left_no_halves_of_it(server: EmbeddedRedis, run_async: RunAsync) -> None:
    async def used_bytes() -> int:
        info = (await order(server, "INFO", "memory")).decode()
        return int(dict(line.split(":", 1) for line in info.splitlines() if ":" in line)["used_memory"])

    async def scenario() -> None:
        leader = Leader(server.url)
        await leader.begin()
        await leader.write(Changes(tuple(request(number, 4000) for number in range(2, 500))))
        limit = await used_bytes() + 2_000_000  # less than the 8 MB that a second copy takes
        await order(server, "CONFIG", "SET", "maxmemory", limit)
        epoch = Epoch(2, EPOCH.instance)
        assert await leader.store.take_epoch(EPOCH, epoch, LEASE_MS) == EpochTaken()
        later = Leader(server.url, epoch=epoch)
        later.journal = Journal(Config(), 2, 2)
        later.journal.add(Changes(tuple(request(number, 4000) for number in range(1, 500))), 0)
        for _ in range(4):
            reply = await later.drive()
            assert isinstance(reply, Failed) and "OOM" in reply.why
        assert await later.requests() == set(range(1, 500)), "what was complete is read until the rewrite is"
        await order(server, "CONFIG", "SET", "maxmemory", 0)
        while later.journal.acked < later.journal.last_record:
            await later.drive()
        assert await later.requests() == set(range(1, 500))
        assert await used_bytes() < limit, "something of the attempts is left"
        await later.store.close()
        await leader.store.close()

    run_async(scenario())


def test_a_server_that_cannot_save_is_not_durable(server: EmbeddedRedis, tmp_path: Path, run_async: RunAsync) -> None:
    async def scenario() -> None:
        leader = Leader(server.url)
        await leader.begin()
        (tmp_path / "dump.rdb").mkdir()
        await order(server, "CONFIG", "SET", "save", "900 1")
        await order(server, "BGSAVE")
        while b"rdb_last_bgsave_status:err" not in await order(server, "INFO", "persistence"):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        reply = await leader.write(Changes((request(2),)))
        assert isinstance(reply, Failed) and "MISCONF" in reply.why
        renewed = await leader.store.renew(EPOCH, LEASE_MS)
        assert isinstance(renewed, Failed) and "MISCONF" in renewed.why
        await order(server, "CONFIG", "SET", "save", "")
        await recovered(leader)
        await leader.store.close()

    run_async(scenario())


def test_a_server_that_lost_its_scripts_is_sent_those_of_the_lease_too(server: EmbeddedRedis, run_async: RunAsync) -> None:
    async def scenario() -> None:
        store = Leader(server.url).store
        await order(server, "SCRIPT", "FLUSH")
        assert await store.take_epoch(NO_EPOCH, EPOCH, LEASE_MS) == EpochTaken()
        for call, reply in ((store.renew(EPOCH, LEASE_MS), Renewed()), (store.release(EPOCH), Released())):
            await order(server, "SCRIPT", "FLUSH")
            assert await call == reply
        await order(server, "SCRIPT", "FLUSH")
        assert await store.look() == LeaseView(EPOCH, is_held=False, is_empty=True)
        await store.close()

    run_async(scenario())


def test_a_state_that_changes_while_it_is_read_is_not_taken(
    server: EmbeddedRedis, run_async: RunAsync, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        leader = Leader(server.url)
        await leader.begin()
        command, losses = RespConnection.command, 0

        async def losing(connection: RespConnection, *args: bytes | str | int) -> Any:
            nonlocal losses
            if args[0] == "HSCAN" and not losses:
                losses += 1
                await order(server, "FLUSHALL")
            return await command(connection, *args)

        monkeypatch.setattr(RespConnection, "command", losing)
        assert isinstance(await leader.store.read(EPOCH), Failed) and losses == 1
        await leader.store.close()

    run_async(scenario())


@pytest.mark.parametrize("name", ["meta", "a:log", "a:requests", "a:blocks"])
def test_a_key_that_another_program_has_written_is_named(server: EmbeddedRedis, run_async: RunAsync, name: str) -> None:
    async def scenario() -> None:
        leader = Leader(server.url)
        await leader.begin()
        key = "tessera:{group}:" + name
        await order(server, "DEL", key)
        await order(server, "SET", key, "1")
        reply = await leader.store.read(EPOCH)
        assert isinstance(reply, Failed) and "WRONGTYPE" in reply.why
        own = "list" if name == "a:log" else "hash"
        assert f"({key} is a string, not the {own} of a scheduler group: " in reply.why
        await leader.store.close()

    run_async(scenario())
