"""From the messages of `tessera.v1` to the client's values."""

from dataclasses import replace

from tessera.client.results import Answer, Finish, FinishReason, Model, Piece, Timings, TokenLogprob, TokenLogprobs, Usage
from tessera.v1 import inference_pb2 as pb

_REASONS = {pb.FinishReason.Value(f"FINISH_REASON_{reason.name}"): reason for reason in FinishReason}


def piece_from_proto(message: pb.StreamGenerateResponse) -> Piece:
    """A piece of an answer."""
    return Piece(
        request_id=message.request_id,
        text=message.text,
        text_offset=message.text_offset,
        token_ids=tuple(message.token_ids),
        token_offset=message.token_offset,
        finish=finish_from_proto(message.finish) if message.HasField("finish") else None,
        logprobs=tuple(map(logprobs_from_proto, message.logprobs)),
        prompt_logprobs=tuple(map(logprobs_from_proto, message.prompt_logprobs)),
    )


def answers_from_proto(message: pb.GenerateResponse) -> list[Answer]:
    """All answers, in their order."""
    first = replace(
        _answer(message, message.request_id), prompt_logprobs=tuple(map(logprobs_from_proto, message.prompt_logprobs))
    )
    return [first, *(_answer(choice, message.request_id) for choice in message.others)]


def _answer(message: pb.GenerateResponse | pb.Choice, request_id: str) -> Answer:
    logprobs = tuple(map(logprobs_from_proto, message.logprobs))
    return Answer(request_id, message.text, tuple(message.token_ids), finish_from_proto(message.finish), logprobs)


def logprobs_from_proto(message: pb.TokenLogprobs) -> TokenLogprobs:
    """Those of one token."""
    token = _one(message.token) if message.HasField("token") else None
    return TokenLogprobs(token, message.rank, tuple(map(_one, message.top)), tuple(map(_one, message.asked)))


def _one(message: pb.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(message.token_id, message.logprob, message.text)


def finish_from_proto(message: pb.Finish) -> Finish:
    """The end of an answer; a reason this client does not know counts as ERROR."""
    matched = message.WhichOneof("matched")
    usage, timings = message.usage, message.timings
    return Finish(
        reason=_REASONS.get(message.reason, FinishReason.ERROR),
        stop_token_id=message.stop_token_id if matched == "stop_token_id" else None,
        stop_string=message.stop_string if matched == "stop_string" else None,
        usage=Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens),
        timings=Timings(timings.queue_us, timings.ttft_us, timings.tpot_us, timings.total_us, timings.num_preemptions),
        message=message.message,
    )


def model_from_proto(message: pb.Model) -> Model:
    """A served model."""
    return Model(
        name=message.name,
        architecture=message.architecture,
        vocab_size=message.vocab_size,
        max_model_len=message.max_model_len,
        eos_token_ids=tuple(message.eos_token_ids),
        bos_token_id=message.bos_token_id if message.HasField("bos_token_id") else None,
        max_request_len=message.max_request_len,
    )
