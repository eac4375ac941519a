"""Log-probabilities for people, and for JSON."""

import json
from collections.abc import Iterator
from typing import Any

from services.cli.answer import TimedAnswer
from tessera.client import Answer, TokenLogprob, TokenLogprobs

_BYTES = {0xDC00 + byte: f"\\x{byte:02x}" for byte in range(0x80, 0x100)}
"""What Python's surrogateescape makes of a byte -> how it is shown."""


def table(answer: TimedAnswer | Answer) -> str:
    """A line for each token of the prompt and of the answer, as far as they were asked for; empty where none were."""
    lines = []
    for title, tokens in (("prompt", answer.prompt_logprobs), ("answer", answer.logprobs)):
        if tokens:
            lines += [f"log-probabilities of the {title}: each token's, its rank, the token; others", *map(_line, tokens)]
    return "\n".join(lines)


def as_json(tokens: tuple[TokenLogprobs, ...]) -> list[dict[str, Any] | None]:
    """One object for each token, null where nothing is known."""
    return [
        None
        if told.token is None
        else _object(told.token) | {"rank": told.rank, "top": [*map(_object, told.top)], "asked": [*map(_object, told.asked)]}
        for told in tokens
    ]


def _object(entry: TokenLogprob) -> dict[str, Any]:
    return {"token_id": entry.token_id, "logprob": entry.logprob, "text": _text(entry)}


def _line(told: TokenLogprobs) -> str:
    if told.token is None:
        return "         -"
    return f"{told.token.logprob:10.4f} {told.rank:5}  {'  '.join((_quoted(told.token), *_others(told)))}"


def _others(told: TokenLogprobs) -> Iterator[str]:
    for entry in (*told.top, *told.asked):
        yield f"{_quoted(entry)} {entry.logprob:.4f}"


def _quoted(entry: TokenLogprob) -> str:
    """The text, with bytes that are a part of a character only as \\xHH, so that unlike tokens look unlike."""
    return '"' + json.dumps(entry.text.decode(errors="surrogateescape"), ensure_ascii=False)[1:-1].translate(_BYTES) + '"'


def _text(entry: TokenLogprob) -> str:
    return entry.text.decode(errors="replace")
