"""`tessera chat`: a conversation with a running gateway, answers streamed as they come."""

import asyncio
import sys
from dataclasses import dataclass
from typing import Any

import click

from services.cli.answer import stream_answer, summary, write_piece
from services.cli.exit_status import exit_status
from services.cli.gateway_access import GatewayAccess, access_options, given_access
from services.cli.gateway_options import gateway_options
from services.cli.request_options import given_request, request_options
from services.cli.sampling_options import given_sampling, sampling_options
from tessera.client import ChatMessage, GenerateOptions, TesseraError

RESET = "/reset"
"""The line that forgets what was said."""

_NOT_HERE = ("chat", "prefill")
"""Options of a request that a conversation does not have."""


@click.command("chat", short_help="Talk with the model.")
@gateway_options()
@access_options
@sampling_options
@request_options(without=_NOT_HERE)
def command(**options: Any) -> None:
    """Talk with the model behind a running gateway: each line is a message, the whole conversation goes along with it.

    /reset forgets what was said; Ctrl-C stops an answer, which is then forgotten with its question; Ctrl-D ends. Counts and timings follow
    each answer on standard error.

    \b
    Examples:
      tessera chat --system "Answer in one sentence." --temperature 0.7
      tessera chat --gateway 10.0.0.1:50051 --max-tokens 500

    \b
    Exit status: 0 ended by you; 1 to 3 as of `tessera generate`, where standard input is no terminal and an answer failed.
    """
    asked = GenerateOptions(model=options["model"], timeout_s=options["timeout_s"])
    asked.update(given_sampling(options))
    asked.update(given_request(options))
    peer = _Peer(options["gateways"], options["resume_timeout_s"], given_access(options))
    begin = [] if options["system"] is None else [ChatMessage("system", options["system"])]
    history = list(begin)
    while (line := _read_line()) is not None:
        if line.strip() == RESET:
            history = list(begin)
        elif line.strip():
            history = _turn(peer, [*history, ChatMessage("user", line)], asked)


@dataclass(frozen=True, slots=True)
class _Peer:
    """Whom to ask, and how."""

    gateways: tuple[str, ...]
    resume_timeout_s: float
    access: GatewayAccess


def _turn(peer: _Peer, messages: list[ChatMessage], asked: GenerateOptions) -> list[ChatMessage]:
    """Ask, and return the conversation with the answer; where none came, without the question either. A script ends with an error."""
    try:
        answer = asyncio.run(stream_answer(peer.gateways, messages, asked, write_piece, peer.resume_timeout_s, peer.access))
    except KeyboardInterrupt:
        click.echo("\n[stopped]", err=True)
        return messages[:-1]
    except TesseraError as error:
        click.echo(f"Error: {error}", err=True)
        if not sys.stdin.isatty():
            sys.exit(exit_status(error))
        return messages[:-1]
    click.echo()
    click.echo(summary(answer), err=True)
    return [*messages, ChatMessage("assistant", answer.text)]


def _read_line() -> str | None:
    """The next line; None at the end. The prompt is shown to people only."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        return None
