"""Checks a client's request against the model and the limits table and turns it into a `Submission`: resolved, bounded, with ids drawn."""

import secrets

import numpy as np

from gateway.errors import InvalidField, InvalidRequest
from gateway.generate_input import GenerateInput, SamplingInput
from gateway.prompt import check_token_ids, encode_prompt
from gateway.served_model import ServedModel
from tessera.values.identity import new_request_id
from tessera.values.request import DetokenizeOptions, Submission
from tessera.values.sampling import (
    LIMITS,
    SEED_MAX,
    STOP_STRING_BYTES_MAX,
    STOP_STRINGS_MAX,
    STOP_TOKEN_IDS_MAX,
    SamplingParams,
)

CLIENT_REQUEST_ID_BYTES_MAX = 128


def validate(request: GenerateInput, model: ServedModel, principal: str) -> Submission:
    """The submission that `request` stands for, with a fresh internal id and, where the client gave none, a drawn seed.

    Raises InvalidRequest naming every refused field (of the prompt, the first problem). The model's name is `find_model`'s matter.
    """
    problems = [
        *_number_problems(request.sampling),
        *_stop_token_problems(request.sampling.stop_token_ids, model.info.vocab_size),
        *_stop_string_problems(request.stop),
        *_request_id_problems(request.request_id),
    ]
    try:
        prompt_token_ids = encode_prompt(request.prompt, model)
    except InvalidRequest as error:
        problems.extend(error.fields)
    if problems:
        raise InvalidRequest(problems)
    return Submission(
        request_id=new_request_id(),
        prompt_token_ids=prompt_token_ids,
        sampling=_sampling_params(request.sampling),
        detokenize=DetokenizeOptions(request.stop, request.include_stop_in_output, request.skip_special_tokens),
        client_request_id=request.request_id,
        principal=principal,
    )


def _or_default(name: str, value: float | None) -> float:
    default = LIMITS[name].default
    resolved = default if value is None else value
    assert resolved is not None, f"{name} has no default"
    return resolved


def _sampling_params(given: SamplingInput) -> SamplingParams:
    return SamplingParams(
        seed=secrets.randbelow(SEED_MAX + 1) if given.seed is None else given.seed,
        temperature=_or_default("temperature", given.temperature),
        top_p=_or_default("top_p", given.top_p),
        top_k=int(_or_default("top_k", given.top_k)),
        min_p=_or_default("min_p", given.min_p),
        max_tokens=int(_or_default("max_tokens", given.max_tokens)),
        min_tokens=int(_or_default("min_tokens", given.min_tokens)),
        ignore_eos=given.ignore_eos,
        stop_token_ids=given.stop_token_ids,
    )


def _number_problems(given: SamplingInput) -> list[InvalidField]:
    """One per number outside its limits; if there is none, whether `min_tokens` and `max_tokens` go together."""
    values = {name: getattr(given, name) for name in LIMITS}
    found = [(name, LIMITS[name].problem(value)) for name, value in values.items() if value is not None]
    problems = [InvalidField(f"sampling.{name}", problem) for name, problem in found if problem is not None]
    minimum, maximum = _or_default("min_tokens", given.min_tokens), _or_default("max_tokens", given.max_tokens)
    if not problems and minimum > maximum:
        problems.append(InvalidField("sampling.min_tokens", f"is {minimum}, above max_tokens, which is {maximum}"))
    return problems


def _stop_token_problems(stop_token_ids: tuple[int, ...], vocab_size: int) -> list[InvalidField]:
    field = "sampling.stop_token_ids"
    if len(stop_token_ids) > STOP_TOKEN_IDS_MAX:
        return [InvalidField(field, f"has {len(stop_token_ids)} ids; at most {STOP_TOKEN_IDS_MAX} are taken")]
    return check_token_ids(field, np.array(stop_token_ids, np.int64), vocab_size)


def _stop_string_problems(stop: tuple[str, ...]) -> list[InvalidField]:
    if len(stop) > STOP_STRINGS_MAX:
        return [InvalidField("stop", f"has {len(stop)} strings; at most {STOP_STRINGS_MAX} are taken")]
    sizes = [len(text.encode(errors="surrogatepass")) for text in stop]
    return [
        InvalidField(f"stop[{i}]", f"has {size} bytes; 1 to {STOP_STRING_BYTES_MAX} are taken")
        for i, size in enumerate(sizes)
        if not 1 <= size <= STOP_STRING_BYTES_MAX
    ]


def _request_id_problems(request_id: str) -> list[InvalidField]:
    size = len(request_id.encode(errors="surrogatepass"))
    if size <= CLIENT_REQUEST_ID_BYTES_MAX:
        return []
    return [InvalidField("request_id", f"has {size} bytes; at most {CLIENT_REQUEST_ID_BYTES_MAX} are taken")]
