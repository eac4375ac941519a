"""What a caller asks for, and the message it becomes."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar, cast

from google.protobuf.struct_pb2 import Struct

from tessera.v1 import inference_pb2 as pb

Body = TypeVar("Body", pb.Generation, pb.Limits, pb.Sampling, pb.TokenPrompt)

JsonObject = Mapping[str, Any]
"""A JSON object as `json` reads one."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an assistant made; `id` is the caller's own."""

    name: str
    arguments: JsonObject
    id: str = ""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation; `role` is for example `system`, `user` or `assistant`. A `tool` message answers the call `tool_call_id`."""

    role: str
    content: str
    name: str = ""
    tool_call_id: str = ""
    tool_calls: Sequence[ToolCall] = ()


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


class ChatOptions(TypedDict, total=False):
    """What a prompt of chat messages can have beside them. `tools` and `template_args` go to the model's template;
    `continue_final_message`: the answer goes on with the last message, an assistant's."""

    tools: Sequence[JsonObject]
    template_args: JsonObject
    continue_final_message: bool


class LimitOptions(TypedDict, total=False):
    """How long the request may wait for its first turn, for its first token, and take altogether, on the service's side. What takes longer
    ends with DeadlineExceeded, whose `details.reason` names the limit."""

    max_queue_ms: int
    max_first_token_ms: int
    max_total_ms: int


class GenerateOptions(SamplingOptions, ChatOptions, LimitOptions, total=False):
    """Keywords of `generate` and `stream`. `timeout_s` is the deadline of the whole answer; without one it may take for ever.

    `request_id` and `seed` are drawn where they are left out, so that an error can always name the request, and the same answer goes on
    where it has to be computed again.
    """

    model: str
    request_id: str
    stop: Sequence[str]
    include_stop_in_output: bool
    skip_special_tokens: bool
    priority: int
    cache_salt: str
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
    sampling, chat, limits, rest = _sorted_out(options)
    if not rest.get("request_id"):
        rest["request_id"] = secrets.token_hex(16)
    if sampling.get("seed") is None:
        sampling["seed"] = secrets.randbits(63)
    fields = {**_prompt_fields(prompt, chat), **rest}
    if limits:
        fields["limits"] = _message(pb.Limits, limits)
    return _message(pb.Generation, {**fields, "sampling": _message(pb.Sampling, sampling)})


def several_of(prompt: Prompt, n: int, options: GenerateOptions) -> pb.Generation:
    """As `generation_of`, for `n` answers."""
    generation = generation_of(prompt, options)
    generation.n = n
    return generation


def _sorted_out(options: GenerateOptions) -> tuple[dict[str, Any], ChatOptions, dict[str, Any], dict[str, Any]]:
    """The sampling parameters, the options of a chat, the limits, and what else the body holds."""
    groups = [kind.__annotations__.keys() for kind in (SamplingOptions, ChatOptions, LimitOptions)]
    sampling, chat, limits = ({name: value for name, value in options.items() if name in group} for group in groups)
    others = {name: value for name, value in options.items() if name not in {"timeout_s"}.union(*groups)}
    return sampling, cast(ChatOptions, chat), limits, others


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


def _prompt_fields(prompt: Prompt, chat: ChatOptions) -> dict[str, str | pb.ChatPrompt | pb.TokenPrompt]:
    """The one field of the prompt's oneof that is set, by name."""
    items = [] if isinstance(prompt, str) else list(prompt)
    are_messages = [isinstance(item, ChatMessage) for item in items]
    if any(are_messages) and all(are_messages):
        return {"chat": chat_prompt(cast(Sequence[ChatMessage], items), chat)}
    if any(are_messages):
        raise TypeError("a prompt is text, or chat messages only, or token ids only")
    if chat:
        raise TypeError(f"{', '.join(chat)}: for a prompt of chat messages only")
    return {"text": prompt} if isinstance(prompt, str) else {"tokens": _message(pb.TokenPrompt, {"token_ids": items})}


def chat_prompt(messages: Sequence[ChatMessage], options: ChatOptions) -> pb.ChatPrompt:
    """The message of a conversation. Raises TypeError or ValueError that name what JSON cannot hold."""
    args = options.get("template_args")
    return pb.ChatPrompt(
        messages=[_chat_message(item) for item in messages],
        tools=[_struct("tools", tool) for tool in options.get("tools", ())],
        template_args=None if args is None else _struct("template_args", args),
        continue_final_message=options.get("continue_final_message", False),
    )


def _chat_message(message: ChatMessage) -> pb.ChatMessage:
    calls = [
        pb.ToolCall(id=call.id, name=call.name, arguments=_struct("tool_calls", call.arguments)) for call in message.tool_calls
    ]
    return pb.ChatMessage(
        role=message.role, content=message.content, name=message.name, tool_call_id=message.tool_call_id, tool_calls=calls
    )


def _struct(field: str, value: JsonObject) -> Struct:
    struct = Struct()
    try:
        struct.update(cast(dict[str, Any], value))
    except (TypeError, ValueError, AttributeError) as error:
        raise TypeError(f"{field}: not a JSON object: {error}") from error
    return struct


def tokenize_request(
    prompt: str | Sequence[ChatMessage], model: str, add_special_tokens: bool, chat: ChatOptions
) -> pb.TokenizeRequest:
    """The request of `tokenize`. Raises TypeError as `generation_of` does."""
    if not isinstance(prompt, str):
        return pb.TokenizeRequest(model=model, chat=chat_prompt(prompt, chat), add_special_tokens=add_special_tokens)
    if chat:
        raise TypeError(f"{', '.join(chat)}: for chat messages only")
    return pb.TokenizeRequest(model=model, text=prompt, add_special_tokens=add_special_tokens)
