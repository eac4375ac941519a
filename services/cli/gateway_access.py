"""How a command that is a client proves itself to gateways, and they to it: options for TLS and a token."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from tessera.client import Tls

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class GatewayAccess:
    """`tls` None is plain text; an empty `token` is none."""

    tls: Tls | None = None
    token: str = ""


OPEN = GatewayAccess()
"""To gateways that answer everybody."""

_PATH = click.Path(path_type=Path, exists=True, dir_okay=False)


_TLS_OPTIONS = (
    click.option("--tls-ca", type=_PATH, metavar="PATH", help="Speak TLS; who answers is proven by this CA (PEM)."),
    click.option("--tls-cert", type=_PATH, metavar="PATH", help="Own certificate (PEM), for those that ask for one."),
    click.option("--tls-key", type=_PATH, metavar="PATH", help="Key of the certificate (PEM)."),
    click.option("--tls-name", default="", metavar="NAME", help="What the certificate of who answers says where not its host."),
)
_TOKEN_FILE = click.option("--token-file", type=_PATH, metavar="PATH", help="File with the token that says who you are.")


def tls_options(command: Command) -> Command:
    """Decorate a click command with the options that `given_tls` reads."""
    return _decorated(command, _TLS_OPTIONS)


def access_options(command: Command) -> Command:
    """Decorate a click command with the options that `given_access` reads."""
    return _decorated(command, (*_TLS_OPTIONS, _TOKEN_FILE))


def given_tls(options: dict[str, Any]) -> Tls | None:
    """What the options say; None is plain text. Raises click.UsageError where they do not go together."""
    if (options["tls_cert"] is None) != (options["tls_key"] is None):
        raise click.UsageError("--tls-cert and --tls-key go together: give both or neither")
    if options["tls_ca"] is None and (options["tls_cert"] or options["tls_name"]):
        raise click.UsageError("--tls-cert and --tls-name need --tls-ca")
    return Tls(options["tls_ca"], options["tls_cert"], options["tls_key"], options["tls_name"]) if options["tls_ca"] else None


def given_access(options: dict[str, Any]) -> GatewayAccess:
    """What the options say. Raises click.UsageError where they do not go together."""
    return GatewayAccess(given_tls(options), options["token_file"].read_text().strip() if options["token_file"] else "")


def _decorated(command: Command, options: tuple[Callable[[Command], Command], ...]) -> Command:
    for option in reversed(options):
        command = option(command)
    return command
