"""What a caller asks for, and the message it becomes."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar, cast

from tessera.v1 import inference_pb2 as pb

Body = TypeVar("Body", pb.Generation, pb.Sampling, pb.TokenPrompt)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation; `role` is for example `system`, `user` or `assistant`."""

    role: str
    content: str


Prompt = str | Sequence[ChatMessage] | Sequence[int]
"""Plain text, chat messages, or token ids."""


class SamplingOptions(TypedDict, total=False):
    """How the output is drawn. What is left out takes the server's default."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: Sequence[int]
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[str]
    logprobs: int
    prompt_logprobs: int
    logprob_token_ids: Sequence[int]


class GenerateOptions(SamplingOptions, total=False):
    """Keywords of `generate` and `stream`. `timeout_s` is the deadline of the whole answer; without one it may take for ever.

    `request_id` and `seed` are drawn where they are left out, so that an error can always name the request, and the same answer goes on
    where it has to be computed again.
    """

    model: str
    request_id: str
    stop: Sequence[str]
    include_stop_in_output: bool
    skip_special_tokens: bool
    timeout_s: float


def generation_of(prompt: Prompt, options: GenerateOptions) -> pb.Generation:
    """The body of both Generate calls. Raises TypeError for a prompt of another kind or an unknown keyword, and TypeError or ValueError that
    name the field for a value that its message cannot hold."""
    unknown = options.keys() - GenerateOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"unknown options: {', '.join(sorted(unknown))}")
    letters = [name for name in ("stop", "bad_words") if isinstance(options.get(name), str)]
    if letters:  # a string is a sequence of its letters
        raise TypeError(f"{letters[0]}: a list of strings, not one string")
    names = SamplingOptions.__annotations__.keys()
    sampling = {name: value for name, value in options.items() if name in names}
    rest = {name: value for name, value in options.items() if name not in names and name != "timeout_s"}
    if not rest.get("request_id"):
        rest["request_id"] = secrets.token_hex(16)
    if sampling.get("seed") is None:
        sampling["seed"] = secrets.randbits(63)
    fields = {**_prompt_fields(prompt), **rest}
    return _message(pb.Generation, {**fields, "sampling": _message(pb.Sampling, sampling)})


def _message(kind: type[Body], fields: Mapping[str, Any]) -> Body:
    """The message with these fields. Its own errors name none, so the first field that is refused by itself is named here."""
    try:
        return kind(**fields)
    except (TypeError, ValueError):
        for name, value in fields.items():
            try:
                kind(**{name: value})
            except (TypeError, ValueError) as error:
                wrong = ValueError if isinstance(error, ValueError) else TypeError
                raise wrong(f"{name}: {error}") from error
        raise


def time_left_s(options: GenerateOptions, elapsed_s: float) -> float | None:
    """What is left of `timeout_s` for the next try; None where there is no limit."""
    timeout_s = options.get("timeout_s")
    return None if timeout_s is None else max(0.0, timeout_s - elapsed_s)


def _prompt_fields(prompt: Prompt) -> dict[str, str | pb.ChatPrompt | pb.TokenPrompt]:
    """The one field of the prompt's oneof that is set, by name."""
    if isinstance(prompt, str):
        return {"text": prompt}
    items = list(prompt)
    if items and all(isinstance(item, ChatMessage) for item in items):
        return {"chat": chat_prompt(cast(Sequence[ChatMessage], items))}
    if any(isinstance(item, ChatMessage) for item in items):
        raise TypeError("a prompt is text, or chat messages only, or token ids only")
    return {"tokens": _message(pb.TokenPrompt, {"token_ids": items})}


def chat_prompt(messages: Sequence[ChatMessage]) -> pb.ChatPrompt:
    """The message of a conversation."""
    return pb.ChatPrompt(messages=[pb.ChatMessage(role=item.role, content=item.content) for item in messages])


def tokenize_request(prompt: str | Sequence[ChatMessage], model: str, add_special_tokens: bool) -> pb.TokenizeRequest:
    """The request of `tokenize`."""
    if isinstance(prompt, str):
        return pb.TokenizeRequest(model=model, text=prompt, add_special_tokens=add_special_tokens)
    return pb.TokenizeRequest(model=model, chat=chat_prompt(prompt), add_special_tokens=add_special_tokens)
