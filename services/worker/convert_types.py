"""Protobuf <-> values for `types.proto`: what workers, scheduler sessions and the journal all say of requests and models."""

from tessera.values.finish import Finish, FinishReason
from tessera.values.identity import INSTANCE_ID_BYTES, NO_EPOCH, Epoch
from tessera.values.model import KVGeometry, ModelInfo, WorkerDescription, WorkerLimits
from tessera.values.sampling import SEED_MAX, SamplingParams
from tessera.worker.v1 import types_pb2

_FINISH_REASONS = {types_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}"): reason for reason in FinishReason}


class MalformedMessage(ValueError):
    """A message that no correct peer sends: a field outside its domain, or columns that do not fit each other."""


def epoch_to_proto(epoch: Epoch) -> types_pb2.Epoch:
    """Message of `epoch`."""
    return types_pb2.Epoch(number=epoch.number, instance=epoch.instance)


def epoch_from_proto(message: types_pb2.Epoch) -> Epoch:
    """A term held by an instance, or NO_EPOCH for number 0."""
    if message.number == 0 and not message.instance:
        return NO_EPOCH
    if message.number == 0 or len(message.instance) != INSTANCE_ID_BYTES:
        raise MalformedMessage(f"epoch: number {message.number} with an instance id of {len(message.instance)} bytes")
    return Epoch(message.number, message.instance)


def sampling_to_proto(params: SamplingParams) -> types_pb2.SamplingParams:
    """Message of `params`."""
    return types_pb2.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.seed,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        ignore_eos=params.ignore_eos,
        stop_token_ids=params.stop_token_ids,
        stop_token_sequences=[types_pb2.TokenSequence(token_ids=ids) for ids in params.stop_token_sequences],
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=[types_pb2.LogitBias(token_id=token_id, bias=bias) for token_id, bias in params.logit_bias],
        allowed_token_ids=params.allowed_token_ids,
        bad_words_ids=[types_pb2.TokenSequence(token_ids=ids) for ids in params.bad_words_ids],
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        logprob_token_ids=params.logprob_token_ids,
    )


def sampling_from_proto(message: types_pb2.SamplingParams) -> SamplingParams:
    """Resolved parameters. Their ranges were checked where the request came in, only the seed's width is checked here."""
    if message.seed > SEED_MAX:
        raise MalformedMessage(f"sampling.seed: {message.seed} is above {SEED_MAX}")
    return SamplingParams(
        seed=message.seed,
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        ignore_eos=message.ignore_eos,
        stop_token_ids=tuple(message.stop_token_ids),
        stop_token_sequences=tuple(tuple(sequence.token_ids) for sequence in message.stop_token_sequences),
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty or 1.0,
        logit_bias=tuple((item.token_id, item.bias) for item in message.logit_bias),
        allowed_token_ids=tuple(message.allowed_token_ids),
        bad_words_ids=tuple(tuple(sequence.token_ids) for sequence in message.bad_words_ids),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        logprob_token_ids=tuple(message.logprob_token_ids),
    )


def finish_to_proto(finish: Finish) -> types_pb2.Finish:
    """Message of `finish`."""
    return types_pb2.Finish(
        reason=f"FINISH_REASON_{finish.reason.name}",
        output_len=finish.output_len,
        stop_token_id=finish.stop_token_id,
        stop_string=finish.stop_string,
        message=finish.message,
        limit=finish.limit,
    )


def finish_from_proto(message: types_pb2.Finish) -> Finish:
    """The terminal mark; an unknown reason is malformed."""
    reason = _FINISH_REASONS.get(message.reason)
    if reason is None:
        raise MalformedMessage(f"finish.reason: unknown value {message.reason}")
    return Finish(
        reason=reason,
        output_len=message.output_len,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        stop_string=message.stop_string if message.HasField("stop_string") else None,
        message=message.message,
        limit=message.limit,
    )


def model_info_to_proto(model: ModelInfo) -> types_pb2.ModelInfo:
    """Message of `model`."""
    return types_pb2.ModelInfo(
        name=model.name,
        architecture=model.architecture,
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        eos_token_ids=model.eos_token_ids,
        bos_token_id=model.bos_token_id,
        tokenizer_digest=model.tokenizer_digest,
        weights_digest=model.weights_digest,
    )


def model_info_from_proto(message: types_pb2.ModelInfo) -> ModelInfo:
    """A served model."""
    return ModelInfo(
        name=message.name,
        architecture=message.architecture,
        vocab_size=message.vocab_size,
        max_model_len=message.max_model_len,
        eos_token_ids=tuple(message.eos_token_ids),
        bos_token_id=message.bos_token_id if message.HasField("bos_token_id") else None,
        tokenizer_digest=message.tokenizer_digest,
        weights_digest=message.weights_digest,
    )


def geometry_to_proto(geometry: KVGeometry) -> types_pb2.KvGeometry:
    """Message of `geometry`."""
    return types_pb2.KvGeometry(
        num_blocks=geometry.num_blocks,
        block_size=geometry.block_size,
        bytes_per_token=geometry.bytes_per_token,
        kv_format=geometry.kv_format,
        num_host_blocks=geometry.num_host_blocks,
    )


def geometry_from_proto(message: types_pb2.KvGeometry) -> KVGeometry:
    """A pool layout; a pool without a block of at least one token is malformed."""
    if message.num_blocks < 1 or message.block_size < 1:
        raise MalformedMessage(f"geometry: {message.num_blocks} blocks of {message.block_size} tokens")
    return KVGeometry(
        message.num_blocks, message.block_size, message.bytes_per_token, message.kv_format, message.num_host_blocks
    )


def limits_to_proto(limits: WorkerLimits) -> types_pb2.WorkerLimits:
    """Message of `limits`."""
    return types_pb2.WorkerLimits(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_batches_in_flight=limits.max_batches_in_flight,
        num_speculative_tokens=limits.num_speculative_tokens,
    )


def limits_from_proto(message: types_pb2.WorkerLimits) -> WorkerLimits:
    """Limits of one batch; a limit of 0 is malformed, but for the drafts."""
    if min(message.max_num_seqs, message.max_num_batched_tokens, message.max_batches_in_flight) < 1:
        raise MalformedMessage("limits: every limit must be at least 1")
    return WorkerLimits(
        message.max_num_seqs, message.max_num_batched_tokens, message.max_batches_in_flight, message.num_speculative_tokens
    )


def description_to_proto(description: WorkerDescription) -> types_pb2.WorkerDescription:
    """Message of `description`."""
    return types_pb2.WorkerDescription(
        boot_id=description.boot_id,
        model=model_info_to_proto(description.model),
        geometry=geometry_to_proto(description.geometry),
        limits=limits_to_proto(description.limits),
    )


def description_from_proto(message: types_pb2.WorkerDescription) -> WorkerDescription:
    """What holds for one boot of a worker."""
    if len(message.boot_id) != INSTANCE_ID_BYTES:
        raise MalformedMessage(f"description.boot_id: {len(message.boot_id)} bytes instead of {INSTANCE_ID_BYTES}")
    return WorkerDescription(
        boot_id=message.boot_id,
        model=model_info_from_proto(message.model),
        geometry=geometry_from_proto(message.geometry),
        limits=limits_from_proto(message.limits),
    )
