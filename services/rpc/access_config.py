"""Who a server is to others, and whom it answers: certificates, tokens, and the port of probes."""

from dataclasses import dataclass
from pathlib import Path

from tessera.values.config import ConfigError


@dataclass(frozen=True, slots=True)
class AccessConfig:
    """The same for every role; without any of it everybody who can connect is answered, in plain text. Files are PEM where they are
    certificates, and read again when they change.

    `tls_ca` proves the other processes of the system to this one, at both ends of a connection; a gateway has another option for its clients.
    """

    tls_cert: Path | None = None  # this process's own certificate, and what leads from it to the CA
    tls_key: Path | None = None
    tls_ca: Path | None = None
    tls_peer_name: str = ""  # DNS name in the certificates of all processes of the system; empty: the host's name counts
    tokens: Path | None = None  # see `services.rpc.tokens`
    reflection: bool = True
    health_listen: str = ""  # another address for health alone, in plain text; empty: none

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key go together: give both or neither")
        if self.tls_peer_name and self.tls_ca is None:
            raise ConfigError("tls_peer_name is given, but no tls_ca that proves the name")
