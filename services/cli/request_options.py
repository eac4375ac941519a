"""What a request can have beside its prompt and how it is sampled, as options of a command."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import click

from tessera.client import ChatMessage, GenerateOptions, Prompt

Command = TypeVar("Command", bound=Callable[..., Any])

_LIMITS = {
    "max_queue_ms": "is not scheduled",
    "max_first_token_ms": "has no output",
    "max_total_ms": "has not ended",
}
"""Name of each limit -> what must not last longer."""

_CHAT = ("chat", "system", "prefill", "tools", "template_args")


def request_options(without: tuple[str, ...] = ()) -> Callable[[Command], Command]:
    """Give a command these options but some, which are as if not given; `chat_of` and `given_request` read them."""

    def decorate(command: Command) -> Command:
        for name, option in reversed(_OPTIONS.items()):
            if name not in without:
                command = option(command)
        return command

    return decorate


def chat_of(text: str, options: dict[str, Any]) -> Prompt:
    """The prompt: `text`, or a conversation where an option of one was given."""
    if not any(options[name] for name in _CHAT) and options["system"] is None:
        return text
    system = [] if options["system"] is None else [ChatMessage("system", options["system"])]
    prefill = [ChatMessage("assistant", options["prefill"])] if options["prefill"] else []
    return [*system, ChatMessage("user", text), *prefill]


def given_request(options: dict[str, Any]) -> GenerateOptions:
    """Those that were given, as the client takes them."""
    given = GenerateOptions()
    if options.get("prefill"):
        given["continue_final_message"] = True
    if options["tools"]:
        given["tools"] = options["tools"]
    if options["template_args"]:
        given["template_args"] = dict(options["template_args"])
    if options["priority"] is not None:
        given["priority"] = options["priority"]
    if options["cache_salt"] is not None:
        given["cache_salt"] = options["cache_salt"]
    for name in _LIMITS:
        if options[name] is not None:
            given[name] = options[name]  # type: ignore[literal-required]
    return given


def _tools(_context: click.Context, _parameter: click.Parameter, file: Any) -> list[dict[str, Any]]:
    if file is None:
        return []
    try:
        tools = json.load(file)
    except ValueError as error:
        raise click.BadParameter(f"not JSON: {error}") from error
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise click.BadParameter("not a list of objects")
    return tools


def _template_args(_context: click.Context, _parameter: click.Parameter, given: tuple[str, ...]) -> list[tuple[str, Any]]:
    return [_template_arg(item) for item in given]


def _template_arg(item: str) -> tuple[str, Any]:
    name, is_pair, value = item.partition("=")
    if not is_pair:
        raise click.BadParameter(f"{item!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


_OPTIONS: dict[str, Callable[[Any], Any]] = {
    "chat": click.option("--chat", is_flag=True, help="Send PROMPT as a user's message through the model's chat template."),
    "system": click.option("--system", metavar="TEXT", help="System message before all others; implies a chat."),
    "prefill": click.option(
        "--prefill", metavar="TEXT", help="Begin of the answer, which the model goes on with; implies --chat."
    ),
    "tools": click.option(
        "--tools",
        type=click.File(),
        callback=_tools,
        metavar="FILE",
        help="JSON list of tools that the chat template tells the model of; implies a chat.",
    ),
    "template_args": click.option(
        "--template-arg",
        "template_args",
        multiple=True,
        callback=_template_args,
        metavar="NAME=VALUE",
        help="A variable of the chat template, for example enable_thinking=false; VALUE is JSON, or else text. Implies a chat.",
    ),
    "priority": click.option(
        "--priority",
        type=click.IntRange(-(2**31), 2**31 - 1),
        metavar="INTEGER",
        help="The lower number goes first, where the scheduler's queue is by priority.  [default: 0]",
    ),
    "cache_salt": click.option(
        "--cache-salt", metavar="TEXT", help="Share cached prefixes only with requests of the same salt."
    ),
    **{
        name: click.option(
            f"--{name.replace('_', '-')}",
            type=click.IntRange(1, 2**31 - 1),
            metavar="INTEGER",
            help=f"End the request where it {what} within so many milliseconds.",
        )
        for name, what in _LIMITS.items()
    },
}
