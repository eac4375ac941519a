"""`tessera admin`: what operators see of a running group, and do to it, through one of its gateways."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import Enum
from typing import Any, TypeVar

import click

from services.cli.admin_tables import requests_table, stats_text
from services.cli.exit_status import exit_status
from services.cli.gateway_access import access_options, given_access
from services.cli.gateway_options import gateway_option
from tessera.client import AdminClient, TesseraError

Command = TypeVar("Command", bound=Callable[..., Any])


@click.group("admin", short_help="See and steer a running group.", subcommand_metavar="COMMAND [OPTIONS]")
def command() -> None:
    """See and steer a running group: through any of its gateways, whose leading scheduler answers.

    Where gateways know their callers, it needs a token with the role admin (--token-file).

    \b
    Examples:
      tessera admin stats
      tessera admin requests --json
      tessera admin abort --principal team-a
      tessera admin drain-worker 10.0.0.7:50053

    \b
    Exit status: 0 done; 1 it failed; 2 it was refused (bad option, INVALID_ARGUMENT, NOT_FOUND); 3 no scheduler answers.
    """


def _asks(function: Command) -> Command:
    """Give a command the options that say whom to ask, who asks, and in which form to answer."""
    as_json = click.option("--json", "as_json", is_flag=True, help="Write one JSON object.")
    wrapped: Command = gateway_option(access_options(as_json(function)))
    return wrapped


@contextmanager
def _client(options: dict[str, Any]) -> Iterator[AdminClient]:
    """Ends the command where the group refuses or does not answer."""
    access = given_access(options)
    try:
        with AdminClient(options["gateways"], tls=access.tls, token=access.token) as client:
            yield client
    except TesseraError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(exit_status(error))


def _say(options: dict[str, Any], answer: Any, text: str) -> None:
    """The answer as JSON, or as text for people."""
    click.echo(json.dumps(answer, default=_plain) if options["as_json"] else text)


def _plain(value: Any) -> Any:
    """What JSON has no word for: a dataclass or an enum."""
    return value.value if isinstance(value, Enum) else asdict(value)


@command.command("stats", short_help="The load of the group, and its workers.")
@_asks
def stats(**options: Any) -> None:
    """What runs and waits, the KV cache, the store, and each worker."""
    with _client(options) as client:
        answer = client.stats()
    _say(options, answer, stats_text(answer))


@command.command("requests", short_help="List requests that wait or run.")
@_asks
@click.option("--limit", type=click.IntRange(min=1), default=100, show_default=True, help="List at most so many.")
def requests(**options: Any) -> None:
    """Requests that wait or run, the oldest first; never what they say."""
    with _client(options) as client:
        answer = client.requests(options["limit"])
    _say(options, {"requests": answer}, requests_table(answer))


@command.command("abort", short_help="End one request, or all of a principal.")
@click.argument("request_id", metavar="[ID]", default="")
@_asks
@click.option("--principal", metavar="NAME", help="Instead of one request: all that belong to NAME ('' is nobody's).")
def abort(request_id: str, principal: str | None, **options: Any) -> None:
    """End the request of this ID (the first column of `tessera admin requests`), or all of a principal."""
    if bool(request_id) == (principal is not None):
        raise click.UsageError("give an ID, or --principal NAME")
    with _client(options) as client:
        count = client.abort(request_id, principal=principal)
    _say(options, {"num_aborted": count}, f"{count} aborted")


@command.command("reset-prefix-cache", short_help="Forget cached prefixes that no request holds.")
@_asks
def reset_prefix_cache(**options: Any) -> None:
    """Forget the cached prefixes that no request holds, for good."""
    with _client(options) as client:
        answer = client.reset_prefix_cache()
    held = f"; {answer.num_held_blocks} stay, since requests hold them" if answer.num_held_blocks else ""
    _say(options, answer, f"{answer.num_forgotten_blocks} blocks forgotten{held}")


@command.command("pause", short_help="Refuse new requests for a while.")
@_asks
def pause(**options: Any) -> None:
    """Refuse new requests (UNAVAILABLE) until `tessera admin resume`, or until another scheduler leads."""
    with _client(options) as client:
        client.pause_admission()
    _say(options, {"admission_paused": True}, "new requests are refused; running ones go on")


@command.command("resume", short_help="Take new requests again.")
@_asks
def resume(**options: Any) -> None:
    """Take new requests again."""
    with _client(options) as client:
        client.resume_admission()
    _say(options, {"admission_paused": False}, "new requests are taken in")


@command.command("drain-worker", short_help="Empty a worker, so that it can be stopped.")
@click.argument("address")
@_asks
def drain_worker(address: str, **options: Any) -> None:
    """Give the worker at ADDRESS (see `tessera admin stats`) no more requests, and its own to others, so that it can be stopped."""
    with _client(options) as client:
        count = client.drain_worker(address)
    text = f"it still holds {count} requests" if count else "it holds no request and can be stopped"
    _say(options, {"num_requests": count}, text)


@command.command("undrain-worker", short_help="Let a drained worker take requests again.")
@click.argument("address")
@_asks
def undrain_worker(address: str, **options: Any) -> None:
    """The worker at ADDRESS takes requests again."""
    with _client(options) as client:
        client.undrain_worker(address)
    _say(options, {}, "it takes requests")
