"""Requests of vllm.grpc.engine as values. What is not offered here is refused by name, never left out silently.

Presence: `temperature`, `max_tokens`, `seed` and the log-probabilities are absent where not set; of the other numbers 0 is "not set", which
for `top_p` and `repetition_penalty` means 1. `spaces_between_special_tokens` and `include_stop_str_in_output` are about text, which does
not leave an engine; `grammar_from_first_token` is about the constraints, which are refused.
"""

import secrets
from collections.abc import Iterator
from typing import Any

import numpy as np

from gateway.errors import InvalidField, InvalidRequest
from gateway.generate_input import GenerateInput, SamplingInput
from gateway.prompt import encode_prompt
from gateway.served_model import ServedModel
from gateway.validation import validate
from tessera.values.request import Submission

_FIELDS = {"sampling.": "sampling_params.", "stop": "sampling_params.stop", "tokens.token_ids": "tokenized.input_ids"}
"""Where what the validation names stands in this protocol's GenerateRequest, by its beginning; other names are the same."""

_NOT_OFFERED = (
    "kv_transfer_params",
    "kv_transfer_params_json",
    "mm_inputs",
    "media_refs",
)

PROMPT_FIELDS = {"text": "text", "tokenized": "tokenized.input_ids"}
"""Where the prompt stands, by the form's name in the oneof."""


def submission_from_proto(request: Any, model: ServedModel, max_request_len: int, principal: str) -> Submission:
    """A `GenerateRequest` checked. An absent `max_tokens` is as many as still fit `max_request_len`, prompt and output together, tokens.

    Raises InvalidRequest with paths in the request.
    """
    problems = [InvalidField(field, why) for field, why in _refusals(request)]
    if problems:
        raise InvalidRequest(problems)
    try:
        prompt_token_ids = encode_prompt(_prompt(request), model)
        room = max(1, max_request_len - len(prompt_token_ids))
        asked = GenerateInput(
            prompt=prompt_token_ids,
            request_id=request.request_id or secrets.token_hex(16),
            sampling=_sampling(request.sampling_params, room),
            stop=tuple(request.sampling_params.stop),
            skip_special_tokens=request.sampling_params.skip_special_tokens,
        )
        return validate(asked, model, principal)
    except InvalidRequest as error:
        raise InvalidRequest([InvalidField(_renamed(item.field), item.description) for item in error.fields]) from error


def _refusals(request: Any) -> Iterator[tuple[str, str]]:
    """Field and reason of everything asked for that is not offered."""
    for field in _NOT_OFFERED:
        if request.HasField(field):
            yield field, "is not offered here"
    if request.extra_mm_inputs:
        yield "extra_mm_inputs", "is not offered here"
    if request.data_parallel_rank:
        yield "data_parallel_rank", f"is {request.data_parallel_rank}; there is one rank, 0"
    params = request.sampling_params
    constraint = params.WhichOneof("constraint")
    if constraint is not None:
        yield f"sampling_params.{constraint}", "is not offered here: output cannot be constrained"
    if params.n > 1:
        yield "sampling_params.n", f"is {params.n}; one output per request is offered"
    if params.HasField("truncate_prompt_tokens"):
        yield "sampling_params.truncate_prompt_tokens", "is not offered here: send the prompt as it is to be read"


def _prompt(request: Any) -> str | np.ndarray:
    if request.WhichOneof("input") is None:
        raise InvalidRequest([InvalidField("tokenized", "is missing; give token ids or text")])
    if request.WhichOneof("input") == "text":
        text: str = request.text
        return text
    return np.fromiter(request.tokenized.input_ids, np.int64)


def _sampling(params: Any, room: int) -> SamplingInput:
    def given(name: str) -> Any:
        return getattr(params, name) if params.HasField(name) else None

    return SamplingInput(
        temperature=given("temperature"),
        top_p=params.top_p or None,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=given("seed"),
        max_tokens=given("max_tokens") if params.HasField("max_tokens") else room,
        min_tokens=params.min_tokens,
        ignore_eos=params.ignore_eos,
        stop_token_ids=tuple(params.stop_token_ids),
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty or None,
        logit_bias=tuple(sorted(params.logit_bias.items())),
        logprobs=given("logprobs"),
        prompt_logprobs=given("prompt_logprobs"),
    )


def _renamed(field: str) -> str:
    for begin, ours in _FIELDS.items():
        if field.startswith(begin):
            return ours + field.removeprefix(begin)
    return field
