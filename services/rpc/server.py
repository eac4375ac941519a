"""One bootstrap for all roles: a gRPC server with health, reflection, errors as statuses, TLS, access, a ready file and a graceful end.

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.rpc.access import AccessInterceptor, Gatekeeper
from services.rpc.access_config import AccessConfig
from services.rpc.bind_error import BindError
from services.rpc.health import HealthServicer
from services.rpc.interceptor import ErrorInterceptor
from services.rpc.metrics_server import MetricsServer
from services.rpc.reflection import add_reflection
from services.rpc.tls import TlsFiles, server_credentials
from services.rpc.tokens import Role, TokenFile
from tessera.values.config import ConfigError

if TYPE_CHECKING:
    from services.rpc.spans import Tracing

_log = structlog.get_logger()

INNER_MESSAGE_BYTES = 256 << 20
"""Largest message between our own processes: a Hello carries the tokens of every live request."""

PENDING_CALLS_MIN = 16_384
PENDING_PER_CALL = 4
"""How many calls that no handler has seen yet are held at least, and for each that the service lets run. gRPC's own bound is 3000, and from 1000
on it picks some by chance: those end as CANCELLED, without a word of when to come again, which the service would have said."""

_INT32_MAX = 2**31 - 1

_HEALTH_NAME = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """`listen` is `host:port` (port 0: any free one) or `unix:/path`. `ready_file` gets the JSON object `{"address": ...}`, with
    `health_address` and `metrics` where these are served, once the server answers; it goes away at the end. `connection_age_s`: after this long a connection is
    asked to end, so that clients look for new servers; streams on it go on. None: never, for links between our own processes.
    `calls_max`: how many calls the service lets run; it refuses more itself. 0: it does not count them.
    `is_public`: clients are not of this system, and it is `client_ca` instead of the system's CA that proves them."""

    listen: str
    receive_bytes_max: int = INNER_MESSAGE_BYTES
    ready_file: Path | None = None
    connection_age_s: float | None = None
    calls_max: int = 0
    access: AccessConfig = field(default_factory=AccessConfig)
    is_public: bool = False
    client_ca: Path | None = None

    def __post_init__(self) -> None:
        if self.access.tls_cert is None and self.client_ca is not None:
            raise ConfigError("tls_client_ca is given, but no tls_cert: clients show certificates only to who shows one")
        if self.access.tls_cert is None and self.access.tls_ca is not None and not self.is_public:
            raise ConfigError("tls_ca is given, but no tls_cert: this process would answer everybody in plain text")

    @property
    def tls(self) -> TlsFiles | None:
        """What the server shows and wants to be shown; None for plain text. Tokens take the place of the system's own certificates."""
        if self.access.tls_cert is None:
            return None
        inner_ca = None if self.access.tokens else self.access.tls_ca
        return TlsFiles(self.access.tls_cert, self.access.tls_key, self.client_ca if self.is_public else inner_ca)

    def gatekeeper(self) -> Gatekeeper:
        """Who says who callers are. Raises ConfigError where the file of tokens cannot be used."""
        tokens = TokenFile(self.access.tokens) if self.access.tokens is not None else None
        role = Role.PUBLIC if self.is_public else Role.INTERNAL
        shows = self.tls is not None and self.tls.ca is not None
        return Gatekeeper(tokens, role if shows else None, self.access.tls_peer_name)

    def options(self) -> list[tuple[str, int]]:
        """Channel arguments; without the ping ones a client's keepalives during a long prefill end in GOAWAY "too_many_pings"."""
        pending_max = min(max(PENDING_CALLS_MIN, PENDING_PER_CALL * self.calls_max), _INT32_MAX)
        options = [
            ("grpc.max_receive_message_length", self.receive_bytes_max),
            ("grpc.max_send_message_length", INNER_MESSAGE_BYTES),
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.server.max_pending_requests", pending_max),  # between this and the next, chance decides
            ("grpc.server.max_pending_requests_hard_limit", pending_max),
            ("grpc.so_reuseport", 0),  # a port that is taken is an error, not a lottery
        ]
        if self.connection_age_s is not None:
            options.append(("grpc.max_connection_age_ms", int(self.connection_age_s * 1000)))
        return options


class RpcServer:
    """A server before, while and after it runs. `add` comes before `start`. Belongs to one event loop. Raises ConfigError where its tokens
    cannot be used.

    Where there are `metrics`, its calls are counted there, and they are served for as long as it runs. Where there is `tracing`, each
    call of its services is a span; the caller stops it.
    """

    def __init__(self, config: ServerConfig, metrics: MetricsServer | None = None, tracing: "Tracing | None" = None) -> None:
        self.health = HealthServicer()
        self._config = config
        self._metrics = metrics
        self._roles: dict[str, Role] = {}
        interceptors: list[grpc.aio.ServerInterceptor] = [
            ErrorInterceptor(metrics.calls.note_refusal if metrics is not None else None),
            AccessInterceptor(config.gatekeeper(), self._roles),
        ]
        if tracing is not None:
            from services.rpc.call_traces import CallTraces  # here: it needs OpenTelemetry

            interceptors.insert(0, CallTraces(tracing, self._roles))
        if metrics is not None:
            interceptors.insert(0, metrics.calls)
        self._server = grpc.aio.server(interceptors=interceptors, options=config.options())
        self._health_server: grpc.aio.Server | None = None
        self._health_address = ""

    def add(
        self,
        register: Callable[[Any, Any], None],
        servicer: Any,
        name: str,
        ready: bool = True,
        role: Role = Role.INTERNAL,
    ) -> None:
        """Serve `servicer` to callers of `role`; `register` is the generated `add_...Servicer_to_server`, `name` the service's full name,
        `ready` what health says of it at first."""
        register(servicer, self._server)
        self._roles[name] = role
        self.health.set_ready(name, ready)

    async def start(self, announce: bool = True, others: Mapping[str, str] | None = None) -> str:
        """Listen and answer. Returns the address with the port that was bound. Raises BindError. A role that answers health before it
        can serve passes `announce` False and calls `announce` later. `others`: see `announce`. Raises ConfigError where the certificates
        cannot be used."""
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        if self._config.access.reflection:
            add_reflection(self._server, (*self._roles, _HEALTH_NAME))
        tls = self._config.tls
        address = _bind(self._server, self._config.listen, server_credentials(tls) if tls is not None else None)
        await self._start_health()
        if self._metrics is not None:
            self._metrics.start()
        await self._server.start()
        if announce:
            self.announce(address, others)
        _log.info("listening", address=address)
        return address

    def announce(self, address: str, others: Mapping[str, str] | None = None) -> None:
        """Write the ready file, where one is configured; `others` are further addresses, by name. Raises BindError where that cannot be."""
        if self._config.ready_file is None:
            return
        told = {} if self._metrics is None else {"metrics": self._metrics.address}
        try:
            health = {"health_address": self._health_address} if self._health_address else {}
            _write_whole(self._config.ready_file, json.dumps({"address": address, **health, **(others or {}), **told}) + "\n")
        except OSError as error:
            raise BindError(f"cannot write ready_file {self._config.ready_file}: {error.strerror}") from error

    async def stop(self, grace_s: float) -> None:
        """End gracefully: NOT_SERVING, no new connections; calls still running after `grace_s` seconds are cancelled."""
        self.health.drain()
        if self._config.ready_file is not None:
            self._config.ready_file.unlink(missing_ok=True)
        await self._server.stop(grace_s)
        if self._health_server is not None:
            await self._health_server.stop(0)
        if self._metrics is not None:
            await self._metrics.stop()
        _log.info("stopped")

    async def _start_health(self) -> None:
        """Health in plain text, for probes that can do no TLS."""
        if not self._config.access.health_listen:
            return
        self._health_server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=self._config.options())
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._health_server)
        self._health_address = _bind(self._health_server, self._config.access.health_listen, None)
        await self._health_server.start()


def _bind(server: grpc.aio.Server, listen: str, credentials: grpc.ServerCredentials | None) -> str:
    """Bind `server`; the address with the port that was bound. Raises BindError."""
    port_text = listen.rpartition(":")[2]
    if not listen.startswith("unix:") and not (port_text.isdigit() and int(port_text) < 65536):
        raise BindError(f"cannot listen on {listen}: it must be HOST:PORT with a port from 0 to 65535, or unix:/PATH")
    try:
        port = server.add_secure_port(listen, credentials) if credentials is not None else server.add_insecure_port(listen)
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
