"""How clients connect, and to which of several gateways."""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from tessera.client.errors import TesseraError

_log = logging.getLogger("tessera.client")

CHANNEL_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.keepalive_time_ms", 1_000),
    ("grpc.keepalive_timeout_ms", 1_500),
    # Any ping under way keeps gRPC from sending another one, and has a timeout of its own (60 s by default): a gateway that stops while
    # one of gRPC's own measuring pings is under way would be noticed after that.
    ("grpc.http2.ping_timeout_ms", 1_500),
    ("grpc.http2.max_pings_without_data", 0),
    # Time for a connection to be made; gRPC has no other name for it.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.service_config", '{"loadBalancingConfig": [{"pick_first": {"shuffleAddressList": true}}]}'),
]
"""While a call runs, a gateway gone or stopped without a word is noticed within 2.5 s: pings are answered by gRPC's own threads, so a
gateway that is only busy answers them. A connection without a call sends none. One that comes back is found within about half a second. Where a
name stands for several gateways, each client takes any one of them for all its calls."""

SHORT_CALL_TIMEOUT_S = 30.0
"""Deadline of every call but `generate` and `stream`, at each gateway that is tried."""

RESUME_TIMEOUT_S = 60.0
"""How long an answer is tried to be gone on with, where nothing new of it comes."""


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS to gateways, from PEM files, which are read when a client is made. `ca` proves the gateways (None: the authorities that gRPC knows);
    `cert` and `key` are the client's own, both or neither. `server_name` is what the gateways' certificates say where it is not the host."""

    ca: Path | str | None = None
    cert: Path | str | None = None
    key: Path | str | None = None
    server_name: str = ""

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises OSError where a file cannot be read, ValueError where only one of `cert` and `key` is given."""
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key go together: give both or neither")
        ca, key, cert = (Path(file).read_bytes() if file is not None else None for file in (self.ca, self.key, self.cert))
        return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)

    def options(self) -> list[tuple[str, int | str]]:
        """Channel options."""
        return [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []


Metadata = tuple[tuple[str, str], ...]


def metadata_of(token: str) -> Metadata:
    """What goes with every call. Raises ValueError for a token that cannot be sent."""
    if not token:
        return ()
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError("a token has printable ASCII characters and no spaces")
    return (("authorization", f"Bearer {token}"),)


def with_trace(metadata: Metadata) -> Metadata:
    """`metadata` of a call that is made now, with the present span of a program that uses OpenTelemetry; others pay nothing for it."""
    if "opentelemetry.trace" not in sys.modules:
        return metadata
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    told: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(told)
    return (*metadata, *told.items())


_LISTS_OF_THEIR_OWN = ("ipv4:", "ipv6:")
"""Targets in which a comma separates addresses that gRPC itself chooses from."""


def split_addresses(addresses: str | Sequence[str]) -> tuple[str, ...]:
    """One target per gateway. Raises ValueError where there is none, or one twice."""
    if isinstance(addresses, str):
        addresses = [addresses] if addresses.startswith(_LISTS_OF_THEIR_OWN) else addresses.split(",")
    targets = tuple(address.strip() for address in addresses)
    if not targets or not all(targets):
        raise ValueError(f"an address is empty, or there is none: {addresses!r}")
    if len(set(targets)) < len(targets):
        raise ValueError(f"an address is given twice: {', '.join(targets)}")
    return targets


class Gateways:
    """The gateways of a client by number, and which of them it uses at present. Threads may share it: all it changes is one number,
    and any value of that is right."""

    def __init__(self, addresses: tuple[str, ...]) -> None:
        self.addresses = addresses
        self.present = 0

    def leave(self, gateway: int) -> None:
        """`gateway` failed: calls that begin from now on go to the next one."""
        if self.present == gateway:
            self.present = (gateway + 1) % len(self.addresses)

    def log_failure(self, gateway: int, error: TesseraError) -> None:
        """Say that an answer goes on elsewhere, for whoever set up logging."""
        _log.info("request %s, gateway %s: %s; trying again", error.request_id, self.addresses[gateway], error)

    def order(self) -> list[int]:
        """All of them, the present one first."""
        count = len(self.addresses)
        return [(self.present + offset) % count for offset in range(count)]


def open_channel(address: str, tls: Tls | None) -> grpc.Channel:
    """A channel for blocking calls. Nothing is sent before the first of them."""
    if tls is None:
        return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
    return grpc.secure_channel(address, tls.credentials(), options=[*CHANNEL_OPTIONS, *tls.options()])
