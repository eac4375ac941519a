"""One bootstrap for all roles: a gRPC server with health, reflection, errors as statuses, a ready file and a graceful end.

server = RpcServer(ServerConfig(listen="127.0.0.1:50052"))
server.add(add_SchedulerServiceServicer_to_server, servicer, "tessera.scheduler.v1.SchedulerService")
address = await server.start()
await stop_signal()
server.health.drain()
...  # end long streams: a graceful stop waits for them
await server.stop(grace_s=5.0)
"""

import asyncio
import json
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.rpc.health import HealthServicer
from services.rpc.interceptor import ErrorInterceptor
from services.rpc.reflection import add_reflection

_log = structlog.get_logger()

INNER_MESSAGE_BYTES = 256 << 20
"""Largest message between our own processes: a Hello carries the tokens of every live request."""

_HEALTH_NAME = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


class BindError(Exception):
    """The address cannot be listened on, or not be told; the message names it."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """`listen` is `host:port` (port 0: any free one) or `unix:/path`. `ready_file` gets the JSON object
    `{"address": ...}` once the server answers, and goes away at the end. `connection_age_s`: after this long a connection is asked to
    end, so that clients look for new servers; streams on it go on. None: never, for links between our own processes."""

    listen: str
    receive_bytes_max: int = INNER_MESSAGE_BYTES
    ready_file: Path | None = None
    connection_age_s: float | None = None

    def options(self) -> list[tuple[str, int]]:
        """Channel arguments; without the ping ones a client's keepalives during a long prefill end in GOAWAY "too_many_pings"."""
        options = [
            ("grpc.max_receive_message_length", self.receive_bytes_max),
            ("grpc.max_send_message_length", INNER_MESSAGE_BYTES),
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.so_reuseport", 0),  # a port that is taken is an error, not a lottery
        ]
        if self.connection_age_s is not None:
            options.append(("grpc.max_connection_age_ms", int(self.connection_age_s * 1000)))
        return options


class RpcServer:
    """A server before, while and after it runs. `add` comes before `start`. Belongs to one event loop."""

    def __init__(self, config: ServerConfig) -> None:
        self.health = HealthServicer()
        self._config = config
        self._server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=config.options())
        self._names: list[str] = []

    def add(self, register: Callable[[Any, Any], None], servicer: Any, name: str, ready: bool = True) -> None:
        """Serve `servicer`; `register` is the generated `add_...Servicer_to_server`, `name` the service's full name, `ready` what health
        says of it at first."""
        register(servicer, self._server)
        self._names.append(name)
        self.health.set_ready(name, ready)

    async def start(self, announce: bool = True, others: Mapping[str, str] | None = None) -> str:
        """Listen and answer. Returns the address with the port that was bound. Raises BindError. A role that answers health before it
        can serve passes `announce` False and calls `announce` later. `others`: see `announce`."""
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        add_reflection(self._server, (*self._names, _HEALTH_NAME))
        address = self._bind()
        await self._server.start()
        if announce:
            self.announce(address, others)
        _log.info("listening", address=address)
        return address

    def announce(self, address: str, others: Mapping[str, str] | None = None) -> None:
        """Write the ready file, where one is configured; `others` are further addresses, by name. Raises BindError where that cannot be."""
        if self._config.ready_file is None:
            return
        try:
            _write_whole(self._config.ready_file, json.dumps({"address": address, **(others or {})}) + "\n")
        except OSError as error:
            raise BindError(f"cannot write ready_file {self._config.ready_file}: {error.strerror}") from error

    async def stop(self, grace_s: float) -> None:
        """End gracefully: NOT_SERVING, no new connections; calls still running after `grace_s` seconds are cancelled."""
        self.health.drain()
        if self._config.ready_file is not None:
            self._config.ready_file.unlink(missing_ok=True)
        await self._server.stop(grace_s)
        _log.info("stopped")

    def _bind(self) -> str:
        listen = self._config.listen
        port_text = listen.rpartition(":")[2]
        if not listen.startswith("unix:") and not (port_text.isdigit() and int(port_text) < 65536):
            raise BindError(f"cannot listen on {listen}: it must be HOST:PORT with a port from 0 to 65535, or unix:/PATH")
        try:
            port = self._server.add_insecure_port(listen)
        except RuntimeError as error:
            raise BindError(f"cannot listen on {listen}: is the port taken, or the host not ours?") from error
        if listen.startswith("unix:"):
            return listen
        return f"{listen.rpartition(':')[0]}:{port}"


def stop_signal() -> "asyncio.Future[signal.Signals]":
    """A future that SIGTERM or SIGINT resolves, from this call on: make it before anybody can see the server. A SIGINT after that (an
    impatient Ctrl-C) ends the process at once."""
    loop = asyncio.get_running_loop()
    received: asyncio.Future[signal.Signals] = loop.create_future()

    def note(which: signal.Signals) -> None:
        loop.remove_signal_handler(signal.SIGINT)
        if not received.done():
            _log.info("draining", signal=which.name)
            received.set_result(which)

    for which in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(which, note, which)
    return received


def _write_whole(path: Path, text: str) -> None:
    """A reader sees the whole text or no file."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text)
    partial.replace(path)
