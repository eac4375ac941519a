"""Ask a gateway and stream its answer: what `generate` and `up` share."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.cli.gateway_access import OPEN, GatewayAccess
from tessera.client import AsyncClient, Finish, GenerateOptions, Piece, Prompt, TokenLogprobs
from tessera.client.results import joined


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """A whole answer, and when its parts came, in seconds after the request was sent."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish: Finish
    first_token_s: float
    total_s: float
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


RESUME_TIMEOUT_S = 10.0
"""Somebody waits: a gateway's restart and a new leader's takeover take a few seconds, a wrong address for ever."""


async def stream_answer(
    addresses: str | Sequence[str],
    prompt: Prompt,
    options: GenerateOptions,
    write: Callable[[str], None],
    resume_timeout_s: float = RESUME_TIMEOUT_S,
    access: GatewayAccess = OPEN,
) -> TimedAnswer:
    """Send `prompt` to a gateway at one of `addresses`, hand each piece of text to `write`, return the whole. Raises TesseraError."""
    began_s = time.monotonic()
    pieces: list[Piece] = []
    first_token_s = 0.0
    async with AsyncClient(addresses, resume_timeout_s=resume_timeout_s, tls=access.tls, token=access.token) as client:
        async for piece in client.stream(prompt, **options):
            if piece.token_ids and not first_token_s:
                first_token_s = time.monotonic() - began_s
            pieces.append(piece)
            write(piece.text)
    total_s, whole = time.monotonic() - began_s, joined(pieces)
    return TimedAnswer(
        whole.request_id,
        whole.text,
        whole.token_ids,
        whole.finish,
        first_token_s,
        total_s,
        whole.logprobs,
        whole.prompt_logprobs,
    )


def summary(answer: TimedAnswer) -> str:
    """One line for people: why it ended, tokens, and times as this client saw them."""
    usage = answer.finish.usage
    decode_s = answer.total_s - answer.first_token_s
    rate = (
        f", then {(usage.completion_tokens - 1) / decode_s:.1f} tokens/s"
        if usage.completion_tokens > 1 and decode_s > 0
        else ""
    )
    cached = f" ({usage.cached_tokens} from cache)" if usage.cached_tokens else ""
    message = f": {answer.finish.message}" if answer.finish.message else ""
    return (
        f"[{answer.finish.reason.value}{message}; prompt {usage.prompt_tokens} tokens{cached}, "
        f"answer {usage.completion_tokens} tokens; first after {answer.first_token_s:.2f} s{rate}]"
    )


def write_piece(text: str) -> None:
    """Show a piece of text on standard output at once."""
    sys.stdout.write(text)
    sys.stdout.flush()
