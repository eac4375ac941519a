"""Protobuf <-> values at the public API; the messages are `tessera.v1`."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from gateway.delta import Delta, PublicReason
from gateway.generate_input import GenerateInput, LimitsInput, Prompt, SamplingInput
from gateway.resume import GENERATION, ResumeInput
from gateway.served_model import ServedModel
from gateway.token_count import least_tokens
from gateway.tokenizer import Tokenizer
from gateway.validation import LIMIT_MS_MAX
from services.gateway.convert_chat import conversation_from_proto
from services.gateway.convert_logprobs import fill_logprobs
from services.gateway.session import Served
from tessera.v1 import inference_pb2
from tessera.values.finish import Finish
from tessera.values.request import RequestTimings, Submission
from tessera.values.sampling_limits import NUMBER_LIMITS

MAX_TOKENS_FIELD = f"{GENERATION}sampling.max_tokens"
"""Where the most output tokens stand in a Generate request."""

_REASON_TO_PROTO = {reason: f"FINISH_REASON_{reason.name}" for reason in PublicReason}


def generate_input_from_proto(message: inference_pb2.Generation, time_left_s: float | None = None) -> GenerateInput:
    """What a client asks for, unchecked. `time_left_s`: until the deadline of its call, None where it has none."""
    skip = message.skip_special_tokens if message.HasField("skip_special_tokens") else True
    return GenerateInput(
        prompt=_prompt_from_proto(message),
        model=message.model,
        request_id=message.request_id,
        sampling=_sampling_from_proto(message.sampling),
        stop=tuple(message.stop),
        include_stop_in_output=message.include_stop_in_output,
        skip_special_tokens=skip,
        priority=message.priority,
        cache_salt=message.cache_salt,
        limits=_limits_from_proto(message.limits, time_left_s),
        n=message.n if message.HasField("n") else 1,
    )


def least_tokens_of(message: inference_pb2.Generation, model: ServedModel, count: int) -> int:
    """Tokens that a request for `count` answers comes to at the least, whatever its prompt is; unchecked."""
    default = NUMBER_LIMITS["max_tokens"].default
    max_tokens = message.sampling.max_tokens if message.sampling.HasField("max_tokens") else default
    return least_tokens(int(max_tokens or 1), count, model.info.max_model_len)


def prompt_field(message: inference_pb2.Generation) -> str:
    """What to shorten in a Generate request whose prompt is too long: of a chat the largest part."""
    form = message.WhichOneof("prompt")
    if form != "chat":
        return "generation.tokens.token_ids" if form == "tokens" else "generation.text"
    chat = message.chat
    sizes = {
        "messages": sum(item.ByteSize() for item in chat.messages),
        "tools": sum(tool.ByteSize() for tool in chat.tools),
        "template_args": chat.template_args.ByteSize(),
    }
    return f"generation.chat.{max(sizes, key=sizes.__getitem__)}"


def resume_from_proto(message: inference_pb2.Resume) -> ResumeInput:
    """What a client says it has received, unchecked."""
    return ResumeInput(message.number, message.token_offset, message.text_offset, token_ids_from_proto(message.token_ids))


def _limits_from_proto(message: inference_pb2.Limits, time_left_s: float | None) -> LimitsInput:
    """A deadline as far off as no limit can say is none."""
    left_ms = None if time_left_s is None or time_left_s > LIMIT_MS_MAX / 1000 else max(1, int(1000 * time_left_s))
    return LimitsInput(
        message.max_queue_ms if message.HasField("max_queue_ms") else None,
        message.max_first_token_ms if message.HasField("max_first_token_ms") else None,
        message.max_total_ms if message.HasField("max_total_ms") else None,
        left_ms,
    )


def _prompt_from_proto(message: inference_pb2.Generation) -> Prompt | None:
    match message.WhichOneof("prompt"):
        case "text":
            return message.text
        case "chat":
            return conversation_from_proto(message.chat)
        case "tokens":
            return token_ids_from_proto(message.tokens.token_ids)
        case _:
            return None


def token_ids_from_proto(token_ids: Iterable[int]) -> np.ndarray:
    """Token ids int64 `[n]`, unchecked."""
    return np.fromiter(token_ids, np.int64)


def _sampling_from_proto(message: inference_pb2.Sampling) -> SamplingInput:
    def given(name: str) -> float | None:
        return getattr(message, name) if message.HasField(name) else None

    return SamplingInput(
        temperature=given("temperature"),
        top_p=given("top_p"),
        top_k=given("top_k"),  # type: ignore[arg-type]
        min_p=given("min_p"),
        seed=given("seed"),  # type: ignore[arg-type]
        max_tokens=given("max_tokens"),  # type: ignore[arg-type]
        min_tokens=given("min_tokens"),  # type: ignore[arg-type]
        ignore_eos=message.ignore_eos,
        stop_token_ids=tuple(message.stop_token_ids),
        presence_penalty=given("presence_penalty"),
        frequency_penalty=given("frequency_penalty"),
        repetition_penalty=given("repetition_penalty"),
        logit_bias=tuple(sorted(message.logit_bias.items())),
        allowed_token_ids=tuple(message.allowed_token_ids),
        bad_words=tuple(message.bad_words),
        logprobs=given("logprobs"),  # type: ignore[arg-type]
        prompt_logprobs=given("prompt_logprobs"),  # type: ignore[arg-type]
        logprob_token_ids=tuple(message.logprob_token_ids),
    )


def stream_response_to_proto(
    submission: Submission, delta: Delta, tokenizer: Tokenizer, index: int = 0
) -> inference_pb2.StreamGenerateResponse:
    """One piece of answer `index`."""
    response = inference_pb2.StreamGenerateResponse(
        request_id=submission.client_request_id,
        text=delta.text,
        text_offset=delta.text_offset,
        token_ids=delta.token_ids,
        token_offset=delta.token_offset,
        index=index,
        finish=finish_to_proto(len(submission.prompt_token_ids), delta) if delta.finish is not None else None,
    )
    fill_logprobs(response, submission.sampling, delta, tokenizer)
    return response


def whole_answers_to_proto(
    submission: Submission, answers: Sequence[Delta], tokenizer: Tokenizer
) -> inference_pb2.GenerateResponse:
    """Whole answers, all pieces of each joined."""
    answer = answers[0]
    response = inference_pb2.GenerateResponse(
        request_id=submission.client_request_id,
        text=answer.text,
        token_ids=answer.token_ids,
        finish=finish_to_proto(len(submission.prompt_token_ids), answer),
    )
    fill_logprobs(response, submission.sampling, answer, tokenizer)
    for index, other in enumerate(answers[1:], 1):
        finish = finish_to_proto(len(submission.prompt_token_ids), other)
        choice = response.others.add(index=index, text=other.text, token_ids=other.token_ids, finish=finish)
        of_choice = inference_pb2.StreamGenerateResponse()
        fill_logprobs(of_choice, replace(submission.sampling, prompt_logprobs=None), other, tokenizer)
        choice.logprobs.extend(of_choice.logprobs)
    if len(answers) > 1:
        response.total_usage.CopyFrom(total_usage(submission, answers))
    return response


def total_usage(submission: Submission, ends: Sequence[Delta]) -> inference_pb2.Usage:
    """Of several answers to one prompt, from the last piece of each."""
    return inference_pb2.Usage(
        prompt_tokens=len(submission.prompt_token_ids),
        completion_tokens=sum(end.finish.output_len for end in ends if end.finish is not None),
        cached_tokens=ends[0].num_cached_tokens,
    )


def finish_to_proto(prompt_len: int, last: Delta) -> inference_pb2.Finish:
    """How an answer ended, from its last piece."""
    finish, reason, timings = last.finish, last.public_reason, last.timings or RequestTimings()
    assert finish is not None and reason is not None, "only the last piece has an end"
    return inference_pb2.Finish(
        reason=_REASON_TO_PROTO[reason],
        stop_token_id=finish.stop_token_id,
        stop_string=finish.stop_string,
        usage=inference_pb2.Usage(
            prompt_tokens=prompt_len,
            completion_tokens=finish.output_len,
            cached_tokens=last.num_cached_tokens,
        ),
        timings=inference_pb2.Timings(
            queue_us=timings.queue_us,
            ttft_us=timings.ttft_us,
            tpot_us=_tpot_us(finish, timings),
            total_us=timings.total_us,
            num_preemptions=timings.num_preemptions,
        ),
        message=finish.message,
    )


def _tpot_us(finish: Finish, timings: RequestTimings) -> int:
    """Mean time per output token after the first; 0 with fewer than two."""
    after_first = finish.output_len - 1
    return max(0, timings.total_us - timings.ttft_us) // after_first if after_first > 0 else 0


def model_to_proto(served: Served) -> inference_pb2.Model:
    """A served model as clients see it."""
    info = served.model.info
    return inference_pb2.Model(
        name=info.name,
        architecture=info.architecture,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        eos_token_ids=info.eos_token_ids,
        bos_token_id=info.bos_token_id,
        max_request_len=served.max_request_len,
    )
