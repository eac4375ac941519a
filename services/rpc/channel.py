"""Client channels between our own processes, and what this process shows of itself on them."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import structlog

from services.rpc.access_config import AccessConfig
from services.rpc.server import INNER_MESSAGE_BYTES
from services.rpc.tls import TlsFiles, channel_credentials
from services.rpc.watched_files import Stamp
from tessera.values.config import ConfigError

_log = structlog.get_logger()

_OPTIONS = [
    ("grpc.max_receive_message_length", INNER_MESSAGE_BYTES),
    ("grpc.max_send_message_length", INNER_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),  # gRPC takes no less
    ("grpc.min_reconnect_backoff_ms", 500),  # how long one attempt may take
    ("grpc.max_reconnect_backoff_ms", 100),
    ("grpc.enable_http_proxy", 0),  # a proxy in the environment is for the outside
    ("grpc.use_local_subchannel_pool", 1),  # one connection per channel: closing one closes it
]

STAMP_CHECK_S = 1.0
"""How often a channel that does not connect looks for new certificates."""


class _Identity:
    """What a process shows of itself, as the files were when they could last be used."""

    def __init__(self, access: AccessConfig, token_file: Path | None) -> None:
        self.files = TlsFiles(access.tls_cert, access.tls_key, access.tls_ca)
        self.options = [("grpc.ssl_target_name_override", access.tls_peer_name)] if access.tls_peer_name else []
        self._token_file = token_file
        self._stamp = self.files.stamp()
        self._credentials = self._read()

    def credentials(self) -> grpc.ChannelCredentials:
        stamp = self.files.stamp()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._credentials = self._read()
            except ConfigError as error:  # half a change, most likely: the other half changes the stamp again
                _log.error("new certificates cannot be used; the old ones stay", error=str(error))
        return self._credentials

    def _read(self) -> grpc.ChannelCredentials:
        credentials = channel_credentials(self.files)
        if self._token_file is None:
            return credentials
        _token_in(self._token_file)
        return grpc.composite_channel_credentials(credentials, grpc.metadata_call_credentials(_TokenPlugin(self._token_file)))


class _TokenPlugin(grpc.AuthMetadataPlugin):
    """Puts the token into each call, as the file has it then."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __call__(self, context: Any, callback: Any) -> None:
        try:
            callback((("authorization", f"Bearer {_token_in(self._file)}"),), None)
        except ConfigError as error:
            callback((), error)


_identity: _Identity | None = None


def use_identity(access: AccessConfig, token_file: Path | None = None) -> None:
    """What this process shows of itself from now on; once, in its main. `token_file` holds the token that others know it by. Without
    `tls_ca` channels are in plain text. Raises ConfigError where a file cannot be used."""
    global _identity
    if token_file is not None and access.tls_ca is None:
        raise ConfigError("token_file is given, but no tls_ca: a token is not sent in plain text")
    _identity = _Identity(access, token_file) if access.tls_ca is not None else None


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel to `address` that comes back within about 0.2 s once the other side does (with a host that swallows packets, within
    half a second more). The caller closes it, and opens another when `channel_stamp` is no longer what it was before."""
    if _identity is None:
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    return grpc.aio.secure_channel(address, _identity.credentials(), options=[*_OPTIONS, *_identity.options])


def channel_stamp() -> Stamp:
    """Changes when a new channel would show, or trust, other certificates."""
    return _identity.files.stamp() if _identity is not None else ()


async def is_connected(channel: grpc.aio.Channel, stamp: Stamp) -> bool:
    """Wait until `channel` is connected; False where the certificates are no longer those of `stamp` before that: it may never be then."""
    ready = asyncio.ensure_future(channel.channel_ready())
    try:
        while not (await asyncio.wait((ready,), timeout=STAMP_CHECK_S if stamp else None))[0]:
            if channel_stamp() != stamp:
                return False
        ready.result()
        return True
    finally:
        ready.cancel()


def _token_in(file: Path) -> str:
    try:
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"token_file {file} cannot be read: {error}") from error
    if not token or len(token.split()) > 1 or not token.isascii():
        raise ConfigError(f"token_file {file} must hold one token and nothing else")
    return token
