"""One connection to Redis that does nothing but send a command and wait, with a time limit, for its reply.

The journal makes a call per step, and redis-py's client alone costs more CPU per call than the journal may (docs/adr/0001). So
redis-py reads the URL, hiredis parses replies, and this file does the rest.
"""

import asyncio
import ssl
from collections import deque
from typing import Any

import hiredis
from redis.asyncio.connection import SSLConnection, parse_url

_DEFAULT_PORT = 6379


class ErrorReply(Exception):
    """The server refused a command; the text begins with its code, as in `OOM command not allowed ...`."""


class ConnectionLost(Exception):
    """No reply will come: the server cannot be reached, closed the connection, or was silent for too long."""


def read_url(url: str) -> dict[str, Any]:
    """The parts of a `redis://`, `rediss://` or `unix://` URL, in redis-py's names. Raises ValueError."""
    return dict(parse_url(url))


class RespConnection(asyncio.Protocol):
    """An open connection. It is lost at the first timeout, since later replies could not be told apart; open another then."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._reader = hiredis.Reader(replyError=ErrorReply)
        self._waiting: deque[tuple[asyncio.Future[Any], float]] = deque()  # and when its time is up, on the loop's clock
        self._watch: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self._lost: ConnectionLost | None = None

    @classmethod
    async def open(cls, options: dict[str, Any], timeout_s: float) -> "RespConnection":
        """Connect as `read_url` says, authenticate and select the database.

        Raises ConnectionLost, or ErrorReply where the server refuses the credentials.
        """
        loop = asyncio.get_running_loop()
        connection = cls(timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                if "path" in options:
                    await loop.create_unix_connection(lambda: connection, options["path"])
                else:
                    host, port = options.get("host", "localhost"), options.get("port", _DEFAULT_PORT)
                    await loop.create_connection(lambda: connection, host, port, ssl=_tls(options))
                await connection._introduce(options)
        except (OSError, TimeoutError) as error:
            connection.close()
            raise ConnectionLost(f"cannot connect: {error or 'timed out'}") from error
        except BaseException:
            connection.close()
            raise
        return connection

    @property
    def is_lost(self) -> bool:
        """Whether the connection can be used no more."""
        return self._lost is not None

    async def command(self, *args: bytes | str | int) -> Any:
        """The reply to one command: bytes, int, None or a list of these. Raises ErrorReply, or ConnectionLost when no reply came in time."""
        if self._lost is not None:
            raise self._lost
        assert self._transport is not None, "not connected"
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        due_s = loop.time() + self._timeout_s
        self._waiting.append((future, due_s))
        self._transport.write(_packed(args))
        if self._watch is None:  # one timer for all commands: setting and cancelling one for each costs as much as sending it
            self._watch = loop.call_at(due_s, self._watch_oldest)
        return await future

    def close(self) -> None:
        """Close at once."""
        self._lose("closed")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio calls this."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """asyncio calls this."""
        try:
            self._reader.feed(data)
            while self._waiting and (reply := self._reader.gets()) is not False:
                future, _ = self._waiting.popleft()
                if future.done():
                    continue
                if isinstance(reply, ErrorReply):
                    future.set_exception(reply)
                else:
                    future.set_result(reply)
        except hiredis.ProtocolError as error:
            self._lose(f"the server does not speak Redis' protocol: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio calls this."""
        self._lose(f"the server closed the connection{'' if exc is None else f': {exc}'}")

    async def _introduce(self, options: dict[str, Any]) -> None:
        if password := options.get("password"):
            user = options.get("username")
            await self.command("AUTH", *([user] if user else []), password)
        if database := options.get("db"):
            await self.command("SELECT", database)

    def _watch_oldest(self) -> None:
        """A command's time may be up; if not, look again when the oldest one's is."""
        self._watch = None
        if not self._waiting:
            return
        loop, (_, due_s) = asyncio.get_running_loop(), self._waiting[0]
        if due_s <= loop.time():
            self._lose(f"no reply within {self._timeout_s:g} s")
        else:
            self._watch = loop.call_at(due_s, self._watch_oldest)

    def _lose(self, why: str) -> None:
        if self._lost is not None:
            return
        self._lost = ConnectionLost(why)
        if self._transport is not None:
            self._transport.abort()
        if self._watch is not None:
            self._watch.cancel()
        while self._waiting:
            future, _ = self._waiting.popleft()
            if not future.done():
                future.set_exception(ConnectionLost(why))


def _packed(args: tuple[bytes | str | int, ...]) -> bytes:
    """A command as the server reads it. Of large ones hiredis' own packing would take three times as long."""
    parts = [b"*%d\r\n" % len(args)]
    for arg in args:
        data = arg if isinstance(arg, bytes) else str(arg).encode()
        parts += (b"$%d\r\n" % len(data), data, b"\r\n")
    return b"".join(parts)


def _tls(options: dict[str, Any]) -> ssl.SSLContext | None:
    """The TLS settings of a `rediss://` URL, in redis-py's names; None for others."""
    if options.get("connection_class") is not SSLConnection:
        return None
    context = ssl.create_default_context(cafile=options.get("ssl_ca_certs"))
    if options.get("ssl_cert_reqs") == "none":
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if "ssl_certfile" in options:
        context.load_cert_chain(options["ssl_certfile"], options.get("ssl_keyfile"))
    return context
