"""`tessera generate`: one prompt to a running gateway, the answer streamed to standard output."""

import asyncio
import json
import logging
import sys
from dataclasses import asdict
from typing import Any

import click

from services.cli.answer import TimedAnswer, stream_answer, summary, write_piece
from services.cli.exit_status import FAILED, INTERRUPTED, exit_status
from services.cli.gateway_access import access_options, given_access
from services.cli.gateway_options import gateway_options
from services.cli.logprob_table import as_json, table
from services.cli.request_options import chat_of, given_request, request_options
from services.cli.sampling_options import given_sampling, sampling_options
from services.cli.several_answers import ask_several, shown, summary_of_several
from tessera.client import Answer, GenerateOptions, Prompt, TesseraError


@click.command("generate", short_help="Send a prompt and stream the answer.")
@click.argument("prompt")
@gateway_options()
@access_options
@sampling_options
@request_options()
@click.option("--stop", multiple=True, metavar="TEXT", help="A string that ends the answer; may be given up to 16 times.")
@click.option(
    "-n",
    "--answers",
    type=click.IntRange(1, 2**32 - 1),
    default=1,
    show_default=True,
    metavar="COUNT",
    help="So many answers (gateways give up to 16), shown once all are whole: each is that of the seed plus its number. More than one are "
    "asked of the first gateway alone, and not resumed.",
)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object at the end instead of text as it comes.")
def command(prompt: str, **options: Any) -> None:
    """Send PROMPT to a running gateway (`-` reads it from standard input) and stream the answer to standard output.

    Token counts and timings follow on standard error, before them the log-probabilities that were asked for.

    \b
    Examples:
      tessera generate "Once upon a time" --max-tokens 32
      tessera generate --chat "Why is the sky blue?" --temperature 0 --seed 7
      echo "Hello" | tessera generate - --json
      tessera generate -n 3 --temperature 0.8 "Once upon a time"
      tessera generate --gateway 10.0.0.1:50051 --gateway 10.0.0.2:50051 "Once upon a time"

    \b
    Exit status: 0 answered; 1 the request failed; 2 it was refused (bad option, INVALID_ARGUMENT, NOT_FOUND);
    3 no gateway answers in time; 130 interrupted.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # the client says when it goes on at another gateway
    asked = chat_of(sys.stdin.read() if prompt == "-" else prompt, options)
    try:
        is_whole = _several(asked, options) if options["answers"] > 1 else _one(asked, options)
    except TesseraError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(exit_status(error))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    sys.exit(0 if is_whole else FAILED)


def _one(prompt: Prompt, options: dict[str, Any]) -> bool:
    """Stream one answer; whether it is whole. Raises TesseraError."""
    write = _discard if options["as_json"] else write_piece
    access = given_access(options)
    answer = asyncio.run(
        stream_answer(options["gateways"], prompt, _options(options), write, options["resume_timeout_s"], access)
    )
    click.echo(json.dumps(_as_object(answer)) if options["as_json"] else "")
    if not options["as_json"] and (told := table(answer)):
        click.echo(told, err=True)
    click.echo(summary(answer), err=True)
    return answer.finish.is_whole


def _several(prompt: Prompt, options: dict[str, Any]) -> bool:
    """Show several answers; whether all are whole. Raises TesseraError."""
    several = asyncio.run(
        ask_several(options["gateways"], prompt, options["answers"], _options(options), given_access(options))
    )
    if options["as_json"]:
        click.echo(json.dumps({"answers": [_as_object(answer) for answer in several.answers], "total_s": several.total_s}))
    else:
        click.echo(shown(several))
        for index, answer in enumerate(several.answers):
            if told := table(answer):
                click.echo(f"answer {index}:\n{told}", err=True)
    click.echo(summary_of_several(several), err=True)
    return several.are_whole


def _options(options: dict[str, Any]) -> GenerateOptions:
    asked = GenerateOptions(model=options["model"], stop=options["stop"], timeout_s=options["timeout_s"])
    asked.update(given_sampling(options))
    asked.update(given_request(options))
    return asked


def _as_object(answer: TimedAnswer | Answer) -> dict[str, Any]:
    told = {"logprobs": as_json(answer.logprobs), "prompt_logprobs": as_json(answer.prompt_logprobs)}
    finish = asdict(answer.finish) | {"reason": answer.finish.reason.value}
    return asdict(answer) | {"finish": finish} | told


def _discard(_text: str) -> None:
    """With --json nothing is written before the end."""
