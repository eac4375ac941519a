"""Checks a client's request against the model and the limits table and turns it into a `Submission`: resolved, bounded, with ids drawn."""

import secrets
from collections.abc import Iterator

import numpy as np

from gateway.errors import InvalidField, InvalidRequest
from gateway.generate_input import GenerateInput, LimitsInput, SamplingInput
from gateway.prompt import check_token_ids, encode_prompt
from gateway.served_model import ServedModel
from gateway.several_answers import ANSWERS_MAX
from tessera.values.identity import new_request_id
from tessera.values.request import DetokenizeOptions, Submission, TimeLimits
from tessera.values.sampling import SEED_MAX, STOP_STRING_BYTES_MAX, STOP_STRINGS_MAX, SamplingParams
from tessera.values.sampling_limits import (
    BAD_WORDS_MAX,
    LIST_LIMITS,
    NUMBER_LIMITS,
    accepted_params,
    logprob_entries_problem,
)

WORDS_MAX = BAD_WORDS_MAX // 2
"""Each may become two sequences of ids."""

_PUBLIC_NAMES = {"bad_words_ids": "bad_words"}
"""Where a field is called otherwise in the public message."""

CLIENT_REQUEST_ID_BYTES_MAX = 128
CACHE_SALT_BYTES_MAX = 128
LIMIT_MS_MAX = 2**31 - 1


def validate(request: GenerateInput, model: ServedModel, principal: str) -> Submission:
    """The submission that `request` stands for, with a fresh internal id and, where the client gave none, a drawn seed.

    Raises InvalidRequest naming every refused field (of the prompt, the first problem). The model's name is `find_model`'s matter.
    """
    params = _sampling_params(request.sampling, model)
    problems = [] if isinstance(params, SamplingParams) else params
    problems += _stop_string_problems(request.stop) + _name_problems(
        "request_id", request.request_id, CLIENT_REQUEST_ID_BYTES_MAX
    )
    problems += _limit_problems(request.limits)
    if not 1 <= request.n <= ANSWERS_MAX:
        problems.append(InvalidField("n", f"is {request.n}; 1 to {ANSWERS_MAX} answers are given"))
    problems += _name_problems("cache_salt", request.cache_salt, CACHE_SALT_BYTES_MAX)
    try:
        prompt_token_ids = encode_prompt(request.prompt, model)
    except InvalidRequest as error:
        problems.extend(error.fields)
    if not problems and isinstance(params, SamplingParams):
        problems = _logprob_problems(params, len(prompt_token_ids), model.info.max_model_len)
    if problems or not isinstance(params, SamplingParams):
        raise InvalidRequest(problems)
    return Submission(
        request_id=new_request_id(),
        prompt_token_ids=prompt_token_ids,
        sampling=params,
        detokenize=DetokenizeOptions(request.stop, request.include_stop_in_output, request.skip_special_tokens),
        client_request_id=request.request_id,
        principal=principal,
        priority=request.priority,
        cache_salt=request.cache_salt,
        limits=_limits(request.limits),
        is_seed_given=request.sampling.seed is not None,
    )


def _sampling_params(given: SamplingInput, model: ServedModel) -> SamplingParams | list[InvalidField]:
    """The parameters with what is clamped clamped, or why they are refused."""
    vocab_size = model.info.vocab_size
    problems = _id_problems(given, vocab_size) + _bad_word_problems(given.bad_words)
    params = SamplingParams(
        seed=secrets.randbelow(SEED_MAX + 1) if given.seed is None else given.seed,
        temperature=_or_default("temperature", given.temperature),
        top_p=_or_default("top_p", given.top_p),
        top_k=int(_or_default("top_k", given.top_k)),
        min_p=_or_default("min_p", given.min_p),
        max_tokens=int(_or_default("max_tokens", given.max_tokens)),
        min_tokens=int(_or_default("min_tokens", given.min_tokens)),
        presence_penalty=_or_default("presence_penalty", given.presence_penalty),
        frequency_penalty=_or_default("frequency_penalty", given.frequency_penalty),
        repetition_penalty=_or_default("repetition_penalty", given.repetition_penalty),
        ignore_eos=given.ignore_eos,
        stop_token_ids=given.stop_token_ids,
        logit_bias=given.logit_bias,
        allowed_token_ids=given.allowed_token_ids,
        bad_words_ids=() if problems else tuple(_word_ids(given.bad_words, model)),
        logprobs=given.logprobs,
        prompt_logprobs=given.prompt_logprobs,
        logprob_token_ids=given.logprob_token_ids,
    )
    accepted = accepted_params(params, vocab_size)
    if isinstance(accepted, SamplingParams):
        return problems or _none_left_problems(accepted, model.info.eos_token_ids) or accepted
    named = {problem.field.split("[")[0] for problem in problems}
    found = [InvalidField(f"sampling.{_PUBLIC_NAMES.get(item.field, item.field)}", item.problem) for item in accepted]
    return [*(item for item in found if item.field not in named), *problems]


def _none_left_problems(params: SamplingParams, eos_token_ids: tuple[int, ...]) -> list[InvalidField]:
    """What rules out every allowed id whatever the output is: it would end with an error at the first token that comes to that."""
    left = set(params.allowed_token_ids) - {ids[0] for ids in params.bad_words_ids if len(ids) == 1}
    if params.allowed_token_ids and not left:
        return [InvalidField("sampling.allowed_token_ids", "has no id that sampling.bad_words does not rule out")]
    if left and params.min_tokens and not left.difference(eos_token_ids, params.stop_token_ids):
        return [
            InvalidField("sampling.min_tokens", "leaves no id: sampling.allowed_token_ids has only ids that end the output")
        ]
    return []


def _or_default(name: str, value: float | None) -> float:
    default = NUMBER_LIMITS[name].default
    resolved = default if value is None else value
    assert resolved is not None, f"{name} has no default"
    return resolved


def _id_problems(given: SamplingInput, vocab_size: int) -> list[InvalidField]:
    """Of lists that are not too long, the first id that names no token."""
    problems = []
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
        token_ids = getattr(given, name)
        if len(token_ids) <= LIST_LIMITS[name].length_max:
            problems += check_token_ids(f"sampling.{name}", np.array(token_ids, np.int64), vocab_size)
    return problems


def _logprob_problems(params: SamplingParams, prompt_len: int, max_model_len: int) -> list[InvalidField]:
    """Log-probabilities that would be too many to keep."""
    problems = []
    if params.wants_logprobs:
        name = "logprobs" if params.logprobs is not None else "logprob_token_ids"
        per_token = 1 + (params.logprobs or 0) + len(params.logprob_token_ids)
        num_tokens = max(0, min(params.max_tokens, max_model_len - prompt_len))
        problems.append((name, logprob_entries_problem(num_tokens, per_token)))
    if params.prompt_logprobs is not None:
        problems.append(("prompt_logprobs", logprob_entries_problem(prompt_len - 1, 1 + params.prompt_logprobs)))
    return [InvalidField(f"sampling.{name}", problem) for name, problem in problems if problem is not None]


def _bad_word_problems(words: tuple[str, ...]) -> list[InvalidField]:
    field = "sampling.bad_words"
    if len(words) > WORDS_MAX:
        return [InvalidField(field, f"has {len(words)} words; at most {WORDS_MAX} are taken")]
    problems = []
    for i, word in enumerate(words):
        size = len(word.encode(errors="surrogatepass")) if word.strip() else 0
        if not 1 <= size <= STOP_STRING_BYTES_MAX:
            problems.append(
                InvalidField(f"{field}[{i}]", f"has {size} bytes beside spaces; 1 to {STOP_STRING_BYTES_MAX} are taken")
            )
        elif any("\ud800" <= character <= "\udfff" for character in word):
            problems.append(InvalidField(f"{field}[{i}]", "has a lone surrogate, which is no text"))
    return problems


def _word_ids(words: tuple[str, ...], model: ServedModel) -> Iterator[tuple[int, ...]]:
    """The ids of each word at the beginning of a text, and, where these differ from the first one on, after a space (as vLLM does)."""
    for word in words:
        text = word.lstrip()
        first = tuple(model.tokenizer.encode(text, add_special_tokens=False))
        later = tuple(model.tokenizer.encode(" " + text, add_special_tokens=False))
        yield first
        if first and len(later) == len(first) and later[0] != first[0]:
            yield later


def _stop_string_problems(stop: tuple[str, ...]) -> list[InvalidField]:
    if len(stop) > STOP_STRINGS_MAX:
        return [InvalidField("stop", f"has {len(stop)} strings; at most {STOP_STRINGS_MAX} are taken")]
    sizes = [len(text.encode(errors="surrogatepass")) for text in stop]
    return [
        InvalidField(f"stop[{i}]", f"has {size} bytes; 1 to {STOP_STRING_BYTES_MAX} are taken")
        for i, size in enumerate(sizes)
        if not 1 <= size <= STOP_STRING_BYTES_MAX
    ]


def _name_problems(field: str, name: str, bytes_max: int) -> list[InvalidField]:
    size = len(name.encode(errors="surrogatepass"))
    return [] if size <= bytes_max else [InvalidField(field, f"has {size} bytes; at most {bytes_max} are taken")]


def _limit_problems(limits: LimitsInput) -> list[InvalidField]:
    given = {name: getattr(limits, name) for name in ("max_queue_ms", "max_first_token_ms", "max_total_ms")}
    return [
        InvalidField(f"limits.{name}", f"is {ms}; 1 to {LIMIT_MS_MAX} are taken")
        for name, ms in given.items()
        if ms is not None and not 1 <= ms <= LIMIT_MS_MAX
    ]


def _limits(given: LimitsInput) -> TimeLimits | None:
    """None where there are none: most requests have none."""
    limits = TimeLimits(given.max_queue_ms or 0, given.max_first_token_ms or 0, given.max_total_ms or 0, given.deadline_ms or 0)
    return None if limits == TimeLimits() else limits
