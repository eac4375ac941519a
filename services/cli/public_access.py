"""How the gateway of `tessera up` proves itself, and who callers are; and how its own question gets in by that."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from services.cli.config_options import Text
from services.cli.gateway_access import GatewayAccess
from tessera.client import Tls
from tessera.values.config import ConfigError

PUBLIC_ACCESS_TEXTS = {
    "tls_cert": Text(
        "Certificate of the gateway (PEM, with the intermediate ones): it speaks TLS then. The other parts stay on loopback.",
        "PATH",
    ),
    "tls_key": Text("Key of the certificate (PEM, not encrypted).", "PATH"),
    "tls_name": Text("A name that the certificate has, for the question, where that is not the host of --listen.", "NAME"),
    "tokens": Text("File of bearer tokens that callers must have one of: lines of TOKEN PRINCIPAL ROLES.", "PATH"),
    "token_file": Text("File with the token that the question is asked with.", "PATH"),
}


@dataclass(frozen=True, slots=True)
class PublicAccess:
    """Files of the gateway, and of who asks it; without any everybody who can connect is answered, in plain text."""

    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_name: str = ""  # what the certificate says where that is not the host listened on
    tokens: Path | None = None
    token_file: Path | None = None

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key go together: give both or neither")
        if self.tls_name and self.tls_cert is None:
            raise ConfigError("tls_name is given, but no tls_cert that says it")
        if self.token_file is not None and self.tokens is None:
            raise ConfigError("token_file is given, but no file of tokens: nobody asks for one")
        for name in ("tls_cert", "tls_key", "tokens", "token_file"):
            path: Path | None = getattr(self, name)
            if path is not None and not path.is_file():
                raise ConfigError(f"{name} {path} is no file")

    @property
    def scheme(self) -> str:
        """Of a URL of the gateway."""
        return "http" if self.tls_cert is None else "https"

    def gateway_options(self) -> list[str]:
        """Command-line options of the gateway."""
        given = {"--tls-cert": self.tls_cert, "--tls-key": self.tls_key, "--tokens": self.tokens}
        return [word for flag, path in given.items() if path is not None for word in (flag, str(path.absolute()))]

    def of_question(self) -> GatewayAccess:
        """How the question connects: it trusts the gateway's own certificate and no other."""
        tls = Tls(self.tls_cert, server_name=self.tls_name) if self.tls_cert is not None else None
        return GatewayAccess(tls, self.token_file.read_text().strip() if self.token_file is not None else "")

    def generate_options(self) -> str:
        """What `tessera generate` is to be told, as words for a shell, each with a space before it."""
        given = {"--tls-ca": self.tls_cert, "--tls-name": self.tls_name, "--token-file": self.token_file}
        return "".join(f" {flag} {shlex.quote(str(value))}" for flag, value in given.items() if value)

    def curl_options(self) -> str:
        """The same for `buf curl`."""
        given = {"--cacert": self.tls_cert, "--servername": self.tls_name}
        words = "".join(f" {flag} {shlex.quote(str(value))}" for flag, value in given.items() if value)
        if self.tls_cert is None:
            words += " --http2-prior-knowledge"
        if self.token_file is not None:
            words += f' -H "authorization: Bearer $(cat {shlex.quote(str(self.token_file))})"'
        return words
