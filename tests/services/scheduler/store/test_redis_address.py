"""Finding the server: URLs, Sentinels that disagree or are gone, and a real failover."""

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from journal_leader import LEASE_MS, request

from services.free_ports import free_ports
from services.scheduler.core.changes import Changes
from services.scheduler.core.journal import Journal
from services.scheduler.core.journal_call import Failed
from services.scheduler.store import embedded_redis
from services.scheduler.store.embedded_redis import EmbeddedRedis
from services.scheduler.store.port import EpochTaken, Renewed, StoredJournal
from services.scheduler.store.redis_address import read_address
from services.scheduler.store.redis_store import RedisStore
from services.scheduler.store.resp_connection import ConnectionLost, RespConnection, read_url
from tessera.values.config import Config, ConfigError
from tessera.values.identity import NO_EPOCH, Epoch

RunAsync = Callable[..., Any]
EPOCH = Epoch(1, b"e" * 16)
SERVICE = "journal"


def port_of(server: EmbeddedRedis) -> int:
    return int(server.url.rpartition(":")[2])


class Sentinel:
    """A real Sentinel that watches one master and fails over on its own word, soon."""

    def __init__(self, folder: Path, master: EmbeddedRedis) -> None:
        folder.mkdir()
        (self.port,) = free_ports(1)
        lines = [
            f"port {self.port}",
            "bind 127.0.0.1",
            f"dir {folder}",
            f"sentinel monitor {SERVICE} 127.0.0.1 {port_of(master)} 1",
            f"sentinel down-after-milliseconds {SERVICE} 300",
            f"sentinel failover-timeout {SERVICE} 2000",
        ]
        config = folder / "sentinel.conf"
        config.write_text("\n".join(lines) + "\n")
        command = [str(embedded_redis._server_binary()), str(config), "--sentinel"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    @property
    def place(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def command(self, *args: str) -> Any:
        """The answer, once it listens."""
        while True:
            try:
                connection = await RespConnection.open(read_url(f"redis://{self.place}"), 5.0)
            except ConnectionLost:
                await asyncio.sleep(0.02)
                continue
            try:
                return await connection.command(*args)
            finally:
                connection.close()

    async def sees_replica(self) -> None:
        while not await self.command("SENTINEL", "REPLICAS", SERVICE):  # noqa: ASYNC110 - it does not say when
            await asyncio.sleep(0.05)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


async def order(server: EmbeddedRedis, *args: str | int) -> Any:
    connection = await RespConnection.open(read_url(server.url), 5.0)
    try:
        return await connection.command(*args)
    finally:
        connection.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[EmbeddedRedis, EmbeddedRedis]]:
    """A master and another server."""
    master, other = EmbeddedRedis(tmp_path / "m", port=0), EmbeddedRedis(tmp_path / "r", port=0)
    master.start()
    other.start()
    yield master, other
    for server in (master, other):
        server.kill()  # one that has just become a replica does not end when asked


@pytest.fixture
def sentinel(tmp_path: Path, pair: tuple[EmbeddedRedis, EmbeddedRedis]) -> Iterator[Sentinel]:
    """A Sentinel over the master of `pair`."""
    running = Sentinel(tmp_path / "s", pair[0])
    yield running
    running.stop()


async def drive(store: RedisStore, journal: Journal) -> None:
    """Make the journal's calls, through every failure, until the store has everything."""
    while journal.acked < journal.last_record:
        call = journal.next_call(2**60)
        assert call is not None
        reply = await store.call(EPOCH, call)
        journal.on_reply(reply, 0)
        if isinstance(reply, Failed):
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    "url",
    [
        "sentinel://a:1",
        "sentinel://a:1/",
        "sentinel:///service",
        "sentinel://a:1,/service",
        "sentinel://a:x/service",
        "sentinel://a:1/service/one",
        "sentinel://a:1/service/0/1",
        "sentinel://a:1/service?x=y",
        "http://a:1",
        "redis://a:b/0",
    ],
)
def test_a_malformed_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="redis_url"):
        read_address(url)


@pytest.mark.parametrize("url", ["sentinel://:secret@a:1", "redis://:secret/word@a:1/0", "sentinel://:secret/word@a:1/service"])
def test_a_refused_url_does_not_show_its_password(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_address(url)
    assert "secret" not in str(refused.value) and refused.value.__cause__ is None


def test_the_password_comes_from_its_file_at_each_connection(
    pair: tuple[EmbeddedRedis, EmbeddedRedis], tmp_path: Path, run_async: RunAsync
) -> None:
    async def scenario() -> None:
        file = tmp_path / "password"
        file.write_text("old one\n")
        store = RedisStore(pair[0].url, "group", password_file=file)
        await order(pair[0], "CONFIG", "SET", "requirepass", "old one")
        assert await store.take_epoch(NO_EPOCH, EPOCH, LEASE_MS) == EpochTaken()
        await store.close()
        file.unlink()
        reply = await store.renew(EPOCH, LEASE_MS)
        assert isinstance(reply, Failed) and "redis_password_file" in reply.why
        file.write_text("wrong")
        reply = await store.renew(EPOCH, LEASE_MS)
        assert isinstance(reply, Failed) and "WRONGPASS" in reply.why
        file.write_text("old one")
        assert await store.renew(EPOCH, LEASE_MS) == Renewed()
        await store.close()

    run_async(scenario())


def test_the_password_of_a_master_behind_sentinel_comes_from_the_file_too(
    pair: tuple[EmbeddedRedis, EmbeddedRedis], sentinel: Sentinel, tmp_path: Path, run_async: RunAsync
) -> None:
    async def scenario() -> None:
        await sentinel.command("PING")
        file = tmp_path / "password"
        file.write_text("secret")
        await order(pair[0], "ACL", "SETUSER", "journal", "on", ">secret", "+@all", "~*")
        address = read_address(f"sentinel://journal@{sentinel.place}/{SERVICE}", file)
        connection = await address.connect(5.0)
        assert await connection.command("ACL", "WHOAMI") == b"journal"
        connection.close()

    run_async(scenario())


@pytest.mark.parametrize(
    ("url", "content", "problem"),
    [
        ("redis://:own@a:1", "secret", "redis_password_file is given, but redis_url has a password too"),
        ("sentinel://:own@a:1/service", "secret", "redis_password_file is given, but redis_url has a password too"),
        ("redis://a:1", " \n", "is empty: it must hold the password"),
        ("redis://a:1", None, "cannot be read"),
    ],
)
def test_a_password_file_that_cannot_be_used_is_refused(url: str, content: str | None, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "password"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=problem) as refused:
        read_address(url, file)
    assert "own" not in str(refused.value) and "secret" not in str(refused.value)


def test_no_sentinel_that_knows_is_a_lost_connection(sentinel: Sentinel, run_async: RunAsync) -> None:
    async def scenario() -> None:
        await sentinel.command("PING")
        nobody = f"127.0.0.1:{free_ports(1)[0]}"
        with pytest.raises(ConnectionLost, match=r"cannot connect.*no master of this name"):
            await read_address(f"sentinel://{nobody},{sentinel.place}/another").connect(1.0)

    run_async(scenario())


def test_a_dead_sentinel_is_passed_over_and_a_database_selected(sentinel: Sentinel, run_async: RunAsync) -> None:
    async def scenario() -> None:
        await sentinel.command("PING")
        nobody = f"127.0.0.1:{free_ports(1)[0]}"
        connection = await read_address(f"sentinel://{nobody},{sentinel.place}/{SERVICE}/3").connect(5.0)
        assert b" db=3 " in await connection.command("CLIENT", "LIST")
        connection.close()

    run_async(scenario())


def test_a_paused_sentinel_costs_its_share_of_the_time(
    tmp_path: Path, pair: tuple[EmbeddedRedis, EmbeddedRedis], sentinel: Sentinel, run_async: RunAsync
) -> None:
    async def scenario(second: Sentinel) -> None:
        await sentinel.command("PING")
        await second.command("PING")
        second._process.send_signal(signal.SIGSTOP)
        address = read_address(f"sentinel://{second.place},{sentinel.place}/{SERVICE}")
        (await address.connect(2.0)).close()
        (await address.connect(2.0)).close()  # the one that answered is asked first now

    second = Sentinel(tmp_path / "second", pair[0])
    try:
        run_async(scenario(second))
    finally:
        second.stop()


def test_a_server_that_is_no_master_is_not_used(
    pair: tuple[EmbeddedRedis, EmbeddedRedis], sentinel: Sentinel, run_async: RunAsync
) -> None:
    """As from a Sentinel that has not heard of the failover."""

    async def scenario() -> None:
        await sentinel.command("PING")
        address = read_address(f"sentinel://{sentinel.place}/{SERVICE}")
        await order(pair[0], "REPLICAOF", "127.0.0.1", port_of(pair[1]))
        with pytest.raises(ConnectionLost, match="it is a slave"):
            await address.connect(5.0)

    run_async(scenario())


def test_the_journal_goes_on_at_the_new_master(
    pair: tuple[EmbeddedRedis, EmbeddedRedis], sentinel: Sentinel, run_async: RunAsync
) -> None:
    async def scenario() -> None:
        master, replica = pair
        await order(replica, "REPLICAOF", "127.0.0.1", port_of(master))
        await sentinel.sees_replica()
        store, journal = RedisStore(f"sentinel://{sentinel.place}/{SERVICE}", "group"), Journal(Config(), 1, 0)
        assert await store.take_epoch(NO_EPOCH, EPOCH, LEASE_MS) == EpochTaken()
        journal.add(Changes((request(1),)), 0)
        await drive(store, journal)
        assert await order(master, "WAIT", 1, 5000) == 1, "the replica has it"
        assert master.pid is not None
        os.kill(master.pid, signal.SIGKILL)
        journal.add(Changes((request(2),)), 0)
        await drive(store, journal)
        assert (await order(replica, "ROLE"))[0] == b"master"
        assert await store.renew(EPOCH, LEASE_MS) == Renewed()
        stored = await store.read(EPOCH)
        assert isinstance(stored, StoredJournal)
        assert set(stored.state.requests) == {request(1).request_id, request(2).request_id}
        await store.close()

    run_async(scenario())


def test_a_demoted_server_is_left_at_its_first_refusal(pair: tuple[EmbeddedRedis, EmbeddedRedis], run_async: RunAsync) -> None:
    """As behind a name that points to the master: the next connection finds the new one."""

    async def scenario() -> None:
        store = RedisStore(pair[0].url, "group")
        assert await store.take_epoch(NO_EPOCH, EPOCH, LEASE_MS) == EpochTaken()
        connection = store._lease._connection
        await order(pair[0], "REPLICAOF", "127.0.0.1", port_of(pair[1]))
        reply = await store.renew(EPOCH, LEASE_MS)
        assert isinstance(reply, Failed) and "READONLY" in reply.why
        assert connection is not None and connection.is_lost
        await store.close()

    run_async(scenario())
