"""Where the server of the journal is: a fixed place, or whatever Sentinel says at each connection.

    redis://[USER:PASSWORD@]HOST:PORT/DB   rediss://...   unix:///PATH      as redis-py reads them
    sentinel://[USER:PASSWORD@]HOST:PORT,HOST:PORT,.../SERVICE/DB           Sentinels, the name they know the master by, the database

Behind Sentinel, user and password are the servers'; the Sentinels are asked without. The password may be in a file instead, which is read at each
connection, so that it can be replaced while we run.
"""

from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from services.scheduler.store.resp_connection import ConnectionLost, ErrorReply, RespConnection, read_url
from tessera.values.config import ConfigError

SENTINEL_PORT = 26379

_SENTINEL_SCHEME = "sentinel://"


class RedisAddress(Protocol):
    """Knows where to connect."""

    async def connect(self, timeout_s: float) -> RespConnection:
        """A new connection, within three times `timeout_s`. Raises ConnectionLost, or ErrorReply where the server refuses the credentials."""


class Credentials:
    """What a connection to a server needs beside its place: `options`, and the password in `password_file` where there is one. Raises
    ConfigError where that file cannot be used."""

    def __init__(self, options: dict[str, Any], password_file: Path | None) -> None:
        self._options = options
        self._password_file = password_file
        if password_file is not None and "password" in options:
            raise ConfigError("redis_password_file is given, but redis_url has a password too: take it out of the URL")
        self.options()

    def options(self) -> dict[str, Any]:
        """As they are now. Raises ConfigError."""
        if self._password_file is None:
            return self._options
        try:
            password = self._password_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"redis_password_file {self._password_file} cannot be read: {error}") from error
        if not password:
            raise ConfigError(f"redis_password_file {self._password_file} is empty: it must hold the password")
        return {**self._options, "password": password}

    async def open(self, timeout_s: float, **place: Any) -> RespConnection:
        """A connection to `place`, where the options do not have it. Raises ConnectionLost and ErrorReply."""
        try:
            options = self.options()
        except ConfigError as error:  # replaced by something that is none: the next connection may find a better one
            raise ConnectionLost(str(error)) from error
        return await RespConnection.open({**options, **place}, timeout_s)


class FixedAddress:
    """One server."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    async def connect(self, timeout_s: float) -> RespConnection:
        """See `RedisAddress`."""
        return await self._credentials.open(timeout_s)


class SentinelAddress:
    """The master that goes by the name `service`."""

    def __init__(self, sentinels: list[tuple[str, int]], service: str, credentials: Credentials) -> None:
        self._sentinels = sentinels
        self._service = service
        self._credentials = credentials

    async def connect(self, timeout_s: float) -> RespConnection:
        """See `RedisAddress`. A server that is no master is not used, whoever names it one."""
        host, port = await self._find(timeout_s)
        connection = await self._credentials.open(timeout_s, host=host, port=port)
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


def read_address(url: str, password_file: Path | None = None) -> RedisAddress:
    """The address that `url` means. Raises ConfigError."""
    try:
        return _read(url, password_file)
    except ConfigError:
        raise
    except ValueError:  # its text may be a part of a password that has a / or an @
        raise ConfigError(
            "redis_url cannot be read: it is redis://[USER:PASSWORD@]HOST:PORT/DB, rediss://..., unix:///PATH or "
            "sentinel://HOST:PORT,HOST:PORT/SERVICE/DB, and /, @, : and % in a password are %2F, %40, %3A and %25"
        ) from None


def _read(url: str, password_file: Path | None) -> RedisAddress:
    if not url.startswith(_SENTINEL_SCHEME):
        return FixedAddress(Credentials(read_url(url), password_file))
    parts = urlsplit(url)
    credentials, _, hosts = parts.netloc.rpartition("@")
    service, _, database = parts.path.strip("/").partition("/")
    if not service or not (database or "0").isdecimal() or parts.query:
        raise ConfigError("redis_url: behind Sentinel it is sentinel://HOST:PORT,HOST:PORT/SERVICE/DB")
    options: dict[str, Any] = {"db": int(database or "0")}
    user, _, password = credentials.partition(":")
    options |= {name: unquote(text) for name, text in (("username", user), ("password", password)) if text}
    sentinels = [_host_and_port(host) for host in hosts.split(",")]
    return SentinelAddress(sentinels, unquote(service), Credentials(options, password_file))


def _host_and_port(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")  # reads [IPv6]:PORT too
    if not parts.hostname:
        raise ConfigError("redis_url: a Sentinel is HOST:PORT, and one has no host")
    return parts.hostname, parts.port or SENTINEL_PORT
