"""Which processes a list of targets stands for: fixed addresses, and names whose records say who is there at present."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence

import structlog

from tessera.values.config import ConfigError

_log = structlog.get_logger()

DNS_PREFIX = "dns:///"
"""`dns:///NAME:PORT` stands for every address that NAME has, as a headless Kubernetes service gives one per pod."""

REFRESH_S = 2.0
"""Pause between two looks at the names."""


def check_targets(field: str, targets: Sequence[str]) -> None:
    """Raise ConfigError unless `targets` is a list of different `HOST:PORT`, `unix:/PATH` or `dns:///NAME:PORT`, at least one."""
    if not targets:
        raise ConfigError(f"{field} must name at least one HOST:PORT or dns:///NAME:PORT")
    for target in targets:
        if not target.startswith("unix:"):
            _check_host_and_port(field, target)
    if len(set(targets)) < len(targets):
        raise ConfigError(f"{field} names an address twice: {', '.join(targets)}")


def _check_host_and_port(field: str, target: str) -> None:
    host, _, port = target.removeprefix(DNS_PREFIX).rpartition(":")
    if not (host and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(f"{field} must be HOST:PORT or dns:///NAME:PORT with a port from 1 to 65535, got {target!r}")
    try:
        host.encode("idna")
    except UnicodeError as error:  # as looking it up would, where no field's name is known
        raise ConfigError(f"{field}: {target!r} has no name that can be looked up: {error}") from error


def is_local(address: str) -> bool:
    """Whether only processes of this machine reach HOST:PORT or `unix:/PATH`."""
    return address.startswith("unix:") or address.rpartition(":")[0] in ("127.0.0.1", "[::1]", "localhost")


async def addresses(targets: Sequence[str], refresh_s: float = REFRESH_S) -> AsyncIterator[frozenset[str]]:
    """All addresses at present, at once and then after each change. Without `dns:///` targets there is only the first.

    A name that cannot be looked up keeps the addresses it had: a name server that is away takes nobody's workers.
    """
    names = [target.removeprefix(DNS_PREFIX) for target in targets if target.startswith(DNS_PREFIX)]
    fixed = frozenset(target for target in targets if not target.startswith(DNS_PREFIX))
    found: dict[str, frozenset[str]] = {}
    last: frozenset[str] | None = None
    while True:
        for name in names:
            found[name] = await _look_up(name, found.get(name, frozenset()))
        present = fixed.union(*found.values())
        if present != last:
            last = present
            yield present
        if not names:
            return
        await asyncio.sleep(refresh_s)


async def _look_up(name: str, before: frozenset[str]) -> frozenset[str]:
    host, _, port = name.rpartition(":")
    try:
        records = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        _log.warning("name not found", name=host, error=str(error), keeping=len(before))
        return before
    return frozenset(
        f"[{address[0]}]:{port}" if family == socket.AF_INET6 else f"{address[0]}:{port}"
        for family, _, _, _, address in records
    )
