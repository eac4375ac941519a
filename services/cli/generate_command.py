"""`tessera generate`: one prompt to a running gateway, the answer streamed to standard output."""

import asyncio
import json
import sys
from typing import Any

import click
import grpc
from google.protobuf.json_format import MessageToDict

from services.cli.answer import Answer, AnswerFailed, stream_answer, summary, write_piece
from services.cli.sampling_options import build_sampling, sampling_options
from services.cli.up_config import DEFAULT_LISTEN
from tessera.v1.inference_pb2 import ChatMessage, ChatPrompt, FinishReason, Generation

FAILED = 1
REFUSED = 2
UNREACHABLE = 3
INTERRUPTED = 130

_EXIT_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: REFUSED,
    grpc.StatusCode.NOT_FOUND: REFUSED,
    grpc.StatusCode.UNAVAILABLE: UNREACHABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: UNREACHABLE,
}
"""Exit status per gRPC status; FAILED for the others."""


@click.command("generate", short_help="Send a prompt and stream the answer.")
@click.argument("prompt")
@click.option("--chat", is_flag=True, help="Send PROMPT as a user's message through the model's chat template.")
@click.option("--system", metavar="TEXT", help="System message before PROMPT; implies --chat.")
@click.option("--address", default=DEFAULT_LISTEN, show_default=True, metavar="HOST:PORT", help="The gateway.")
@click.option("--model", default="", metavar="NAME", help="A served model; not needed where there is only one.")
@sampling_options
@click.option("--stop", multiple=True, metavar="TEXT", help="A string that ends the answer; may be given up to 16 times.")
@click.option(
    "--timeout-s", type=click.FloatRange(min=0, min_open=True), default=300.0, show_default=True, help="Give up after so long."
)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object at the end instead of text as it comes.")
def command(prompt: str, **options: Any) -> None:
    """Send PROMPT to a running gateway (`-` reads it from standard input) and stream the answer to standard output.

    Token counts and timings follow on standard error.

    \b
    Examples:
      tessera generate "Once upon a time" --max-tokens 32
      tessera generate --chat "Why is the sky blue?" --temperature 0 --seed 7
      echo "Hello" | tessera generate - --json

    \b
    Exit status: 0 answered; 1 the request failed; 2 it was refused (bad option, INVALID_ARGUMENT, NOT_FOUND);
    3 no gateway answers in time; 130 interrupted.
    """
    generation = build_generation(sys.stdin.read() if prompt == "-" else prompt, options)
    write = _discard if options["as_json"] else write_piece
    try:
        answer = asyncio.run(stream_answer(options["address"], generation, write, options["timeout_s"]))
    except AnswerFailed as error:
        click.echo(f"Error: {error.code.name}: {error}", err=True)
        sys.exit(_EXIT_STATUS.get(error.code, FAILED))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    click.echo(json.dumps(as_dict(answer)) if options["as_json"] else "")
    click.echo(summary(answer), err=True)
    sys.exit(0 if answer.finish.reason in (FinishReason.FINISH_REASON_STOP, FinishReason.FINISH_REASON_LENGTH) else FAILED)


def build_generation(prompt: str, options: dict[str, Any]) -> Generation:
    """The request's body from what click parsed."""
    body = Generation(model=options["model"], sampling=build_sampling(options), stop=options["stop"])
    if not options["chat"] and options["system"] is None:
        body.text = prompt
        return body
    system = [] if options["system"] is None else [ChatMessage(role="system", content=options["system"])]
    body.chat.CopyFrom(ChatPrompt(messages=[*system, ChatMessage(role="user", content=prompt)]))
    return body


def as_dict(answer: Answer) -> dict[str, Any]:
    """The answer as JSON has it: text, token ids, and `finish` as the protocol names it."""
    finish = MessageToDict(answer.finish, preserving_proto_field_name=True)
    return {"request_id": answer.request_id, "text": answer.text, "token_ids": list(answer.token_ids), "finish": finish}


def _discard(_text: str) -> None:
    """With --json nothing is written before the end."""
