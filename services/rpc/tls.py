"""TLS of both ends of a connection, from files that may be replaced at any time.

A server reads them again at the first handshake after a change. A client's channel cannot: whoever keeps one open asks for the
`channel_stamp` before, and opens another where it has changed (see `services.rpc.channel`).
"""

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc
import structlog

from services.rpc.watched_files import Stamp, stamp_of
from tessera.values.config import ConfigError

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files: a process's certificate and key (both or neither), and the CA that proves the others."""

    cert: Path | None
    key: Path | None
    ca: Path | None

    @property
    def paths(self) -> tuple[Path, ...]:
        """Those that are given."""
        return tuple(path for path in (self.cert, self.key, self.ca) if path is not None)

    def stamp(self) -> Stamp:
        """Changes when a file does."""
        return stamp_of(self.paths)

    def read(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """What is in them: certificate, key, CA. Raises ConfigError where a file cannot be read or used, or the key is not the
        certificate's."""
        _check(self)
        contents = tuple(path.read_bytes() if path is not None else None for path in (self.cert, self.key, self.ca))
        return contents[0], contents[1], contents[2]


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Of a server with a certificate; clients must show one that the CA has signed, where there is a CA. Raises ConfigError."""
    current = _Current(files)
    return grpc.dynamic_ssl_server_credentials(
        current.configuration, current.fetch, require_client_authentication=files.ca is not None
    )


def channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """Of a client that trusts the CA and shows its own certificate, where it has one. Raises ConfigError."""
    cert, key, ca = files.read()
    return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)


class _Current:
    """The files that a server uses now."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._stamp = files.stamp()
        self.configuration = _server_configuration(files)

    def fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """What is new, or None where it is the old or cannot be used. gRPC asks at every handshake, in a thread of its own."""
        stamp = self._files.stamp()
        if stamp == self._stamp:
            return None
        self._stamp = stamp
        try:
            self.configuration = _server_configuration(self._files)
        except ConfigError as error:  # half a change, most likely: the other half changes the stamp again
            _log.error("new certificates cannot be used; the old ones stay", error=str(error))
            return None
        _log.info("certificates read again", cert=str(self._files.cert))
        return self.configuration


def _server_configuration(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    cert, key, ca = files.read()
    return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=ca)


def _check(files: TlsFiles) -> None:
    """Load them as Python's own ssl does: gRPC says nothing of what is wrong with a file before the first handshake, and little then."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    named = f"tls_cert {files.cert} and tls_key {files.key}"
    try:
        if files.cert is not None and files.key is not None:
            context.load_cert_chain(files.cert, files.key, password=_no_password)
        if files.ca is not None:
            named = f"tls_ca {files.ca}"
            context.load_verify_locations(files.ca)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(f"{named} cannot be used: {error.strerror if isinstance(error, OSError) else error}") from error


def _no_password() -> str:
    """Instead of a question on the terminal."""
    raise ValueError("the key is encrypted, and nobody can be asked for the password")
