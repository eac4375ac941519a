"""Which gateways a command that is a client asks, and for how long."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from services.cli.answer import RESUME_TIMEOUT_S
from services.cli.up_config import DEFAULT_LISTEN
from tessera.client.connection import split_addresses

Command = TypeVar("Command", bound=Callable[..., Any])


def _addresses(_context: click.Context, _parameter: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return split_addresses(given[0] if len(given) == 1 else given)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def gateway_options(resume_timeout_s: float = RESUME_TIMEOUT_S) -> Callable[[Command], Command]:
    """Give a command the options that say whom to ask, and for how long; `resume_timeout_s` is the default of its option."""

    def decorate(command: Command) -> Command:
        for option in reversed((gateway_option, _MODEL, _TIMEOUT, _resume_timeout(resume_timeout_s))):
            command = option(command)
        return command

    return decorate


gateway_option = click.option(
    "--gateway",
    "--address",
    "gateways",
    multiple=True,
    default=(DEFAULT_LISTEN,),
    show_default=True,
    callback=_addresses,
    metavar="HOST:PORT",
    help="A gateway; may be given several times: where one fails the answer goes on with the next.",
)
_MODEL = click.option("--model", default="", metavar="NAME", help="A served model; not needed where there is only one.")
_TIMEOUT = click.option(
    "--timeout-s",
    type=click.FloatRange(min=0, min_open=True),
    default=300.0,
    show_default=True,
    help="Give up after so long.",
)


def _resume_timeout(default_s: float) -> Callable[[Command], Command]:
    return click.option(
        "--resume-timeout-s",
        type=click.FloatRange(min=0),
        default=default_s,
        show_default=True,
        help="Give up when no gateway could go on with the answer for so long; 0: at the first failure.",
    )
