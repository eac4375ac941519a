"""Where the server of the journal is: a fixed place, or whatever Sentinel says at each connection.

    redis://[USER:PASSWORD@]HOST:PORT/DB   rediss://...   unix:///PATH      as redis-py reads them
    sentinel://[USER:PASSWORD@]HOST:PORT,HOST:PORT,.../SERVICE/DB           Sentinels, the name they know the master by, the database

Behind Sentinel, user and password are the servers'; the Sentinels are asked without.
"""

from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from services.scheduler.store.resp_connection import ConnectionLost, ErrorReply, RespConnection, read_url

SENTINEL_PORT = 26379

_SENTINEL_SCHEME = "sentinel://"


class RedisAddress(Protocol):
    """Knows where to connect."""

    async def connect(self, timeout_s: float) -> RespConnection:
        """A new connection, within three times `timeout_s`. Raises ConnectionLost, or ErrorReply where the server refuses the credentials."""


class FixedAddress:
    """One server."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options

    async def connect(self, timeout_s: float) -> RespConnection:
        """See `RedisAddress`."""
        return await RespConnection.open(self._options, timeout_s)


class SentinelAddress:
    """The master that goes by the name `service`. `options` are what its connections need beside host and port."""

    def __init__(self, sentinels: list[tuple[str, int]], service: str, options: dict[str, Any]) -> None:
        self._sentinels = sentinels
        self._service = service
        self._options = options

    async def connect(self, timeout_s: float) -> RespConnection:
        """See `RedisAddress`. A server that is no master is not used, whoever names it one."""
        host, port = await self._find(timeout_s)
        connection = await RespConnection.open({**self._options, "host": host, "port": port}, timeout_s)
        try:
            role, *_ = await connection.command("ROLE")
        except BaseException:
            connection.close()
            raise
        if role != b"master":
            connection.close()
            raise ConnectionLost(f"sentinel names {host}:{port} as the master of {self._service}, and it is a {role.decode()}")
        return connection

    async def _find(self, timeout_s: float) -> tuple[str, int]:
        """What the first Sentinel that knows says; it is asked first from then on."""
        problems = []
        for place in list(self._sentinels):
            try:
                address = await self._ask(place, timeout_s / len(self._sentinels))
            except (ConnectionLost, ErrorReply) as error:
                problems.append(f"{place[0]}:{place[1]}: {error}")
                continue
            if address is not None:
                self._sentinels.remove(place)
                self._sentinels.insert(0, place)
                return address
            problems.append(f"{place[0]}:{place[1]}: no master of this name")
        raise ConnectionLost(f"no sentinel knows the master of {self._service}: {'; '.join(problems)}")

    async def _ask(self, place: tuple[str, int], timeout_s: float) -> tuple[str, int] | None:
        connection = await RespConnection.open({"host": place[0], "port": place[1]}, timeout_s / 2)
        try:
            reply = await connection.command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)
        finally:
            connection.close()
        return None if reply is None else (reply[0].decode(), int(reply[1]))


def read_address(url: str) -> RedisAddress:
    """The address that `url` means. Raises ValueError."""
    if not url.startswith(_SENTINEL_SCHEME):
        return FixedAddress(read_url(url))
    parts = urlsplit(url)
    credentials, _, hosts = parts.netloc.rpartition("@")
    service, _, database = parts.path.strip("/").partition("/")
    if not service or not (database or "0").isdecimal() or parts.query:
        raise ValueError("a sentinel URL is sentinel://HOST:PORT,HOST:PORT/SERVICE/DB")
    options: dict[str, Any] = {"db": int(database or "0")}
    user, _, password = credentials.partition(":")
    if password:
        options |= {"username": unquote(user), "password": unquote(password)}
    return SentinelAddress([_host_and_port(host) for host in hosts.split(",")], unquote(service), options)


def _host_and_port(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")  # reads [IPv6]:PORT too
    if not parts.hostname:
        raise ValueError(f"a sentinel is HOST:PORT, got {text!r}")
    return parts.hostname, parts.port or SENTINEL_PORT
