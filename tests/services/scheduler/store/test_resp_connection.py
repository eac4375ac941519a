"""The connection against servers that are silent, gone, rude, or Redis."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from services.scheduler.store.embedded_redis import EmbeddedRedis
from services.scheduler.store.resp_connection import ConnectionLost, ErrorReply, RespConnection, read_url

RunAsync = Callable[..., Any]
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def against(tmp_path: Path, handler: Handler, timeout_s: float = 0.05) -> Any:
    """What `PING` gives on a server that behaves like `handler`."""
    server = await asyncio.start_unix_server(handler, tmp_path / "s")
    connection = await RespConnection.open(read_url(f"unix://{tmp_path}/s"), timeout_s)
    try:
        return await connection.command("PING")
    finally:
        assert connection.is_lost
        with pytest.raises(ConnectionLost):
            await connection.command("PING")
        server.close()
        await server.wait_closed()


def test_a_silent_server_is_given_up(tmp_path: Path, run_async: RunAsync) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    with pytest.raises(ConnectionLost, match=r"no reply within 0\.05 s"):
        run_async(against(tmp_path, silent))


def test_a_server_that_hangs_up_is_noticed_at_once(tmp_path: Path, run_async: RunAsync) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.close()

    with pytest.raises(ConnectionLost, match="closed the connection"):
        run_async(against(tmp_path, hang_up, timeout_s=30.0))


def test_a_server_of_another_kind_is_given_up(tmp_path: Path, run_async: RunAsync) -> None:
    async def web(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await reader.read()
        writer.close()

    with pytest.raises(ConnectionLost, match="protocol"):
        run_async(against(tmp_path, web, timeout_s=30.0))


def test_nobody_at_the_address_is_a_lost_connection(tmp_path: Path, run_async: RunAsync) -> None:
    for url in (f"unix://{tmp_path}/nobody", "redis://127.0.0.1:1/0"):
        with pytest.raises(ConnectionLost, match="cannot connect"):
            run_async(RespConnection.open(read_url(url), 1.0))


def test_a_malformed_url_is_a_value_error() -> None:
    for url in ("http://host", "redis://host:port", "host:6379"):
        with pytest.raises(ValueError):
            read_url(url)


def test_values_of_every_kind_come_back(tmp_path: Path, run_async: RunAsync) -> None:
    async def scenario(url: str) -> None:
        connection = await RespConnection.open(read_url(url), 5.0)
        odd = bytes(range(256)) * 1000
        assert await connection.command("SET", b"key\r\n", odd) == b"OK"
        assert await connection.command("GET", b"key\r\n") == odd
        assert await connection.command("GET", "none") is None
        assert await connection.command("INCRBY", "number", 2**40) == 2**40
        assert await connection.command("MGET", "number", "none") == [str(2**40).encode(), None]
        with pytest.raises(ErrorReply, match="WRONGTYPE"):
            await connection.command("LPUSH", "number", 1)
        assert await connection.command("PING") == b"PONG", "an error reply ends nothing"
        replies = await asyncio.gather(*(connection.command("ECHO", i) for i in range(50)))
        assert [int(reply) for reply in replies] == list(range(50))
        connection.close()

    with EmbeddedRedis(tmp_path) as server:
        run_async(scenario(server.url))


def test_it_authenticates_and_selects_the_database(tmp_path: Path, run_async: RunAsync) -> None:
    async def scenario(port: str) -> None:
        admin = await RespConnection.open(read_url(f"redis://127.0.0.1:{port}"), 5.0)
        await admin.command("CONFIG", "SET", "requirepass", "secret")
        await admin.command("SET", "where", "zero")
        admin.close()
        connection = await RespConnection.open(read_url(f"redis://:secret@127.0.0.1:{port}/2"), 5.0)
        assert await connection.command("GET", "where") is None
        connection.close()
        with pytest.raises(ErrorReply, match="WRONGPASS"):
            await RespConnection.open(read_url(f"redis://:wrong@127.0.0.1:{port}/2"), 5.0)

    with EmbeddedRedis(tmp_path, port=0) as server:
        run_async(scenario(server.url.rsplit(":", 1)[1]))


def test_a_cancelled_command_leaves_the_others_in_step(tmp_path: Path, run_async: RunAsync) -> None:
    async def scenario(url: str) -> None:
        connection = await RespConnection.open(read_url(url), 5.0)
        given_up = asyncio.create_task(connection.command("ECHO", "one"))
        await asyncio.sleep(0)
        given_up.cancel()
        assert await connection.command("ECHO", "two") == b"two"
        connection.close()

    with EmbeddedRedis(tmp_path) as server:
        run_async(scenario(server.url))
