"""One role as this process: what cannot work ends it with one line instead of a traceback, which is left to bugs."""

import sys
from collections.abc import Callable
from typing import TypeVar

import click

from gateway.errors import GatewayError
from services.cli.config_options import said_of_options
from services.rpc.bind_error import BindError
from tessera.values.config import ConfigError
from tessera.values.known_models import ModelError

Config = TypeVar("Config")


def run_role(run: Callable[[Config], None], config: Config) -> None:
    """Run until the role ends. Exits 1, saying why, for a model, an address or a number that cannot be used."""
    try:
        run(config)
    except (BindError, ConfigError, GatewayError, ModelError) as error:
        click.echo(f"Error: {said_of_options(str(error))}", err=True)
        sys.exit(1)
