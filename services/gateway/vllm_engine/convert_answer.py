"""Answers in the messages of vllm.grpc.engine: pieces hold what is new, token ids and numbers, no text."""

from collections.abc import Iterator
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2

from gateway.delta import Delta, PublicReason
from services.gateway.session import Served
from tessera.values.load import GroupLoad
from tessera.values.logprobs import Logprobs
from tessera.values.request import Submission

INT32_MAX = 2**31 - 1
"""The most that this protocol can say of a count."""

_REASONS = {
    PublicReason.STOP: "stop",
    PublicReason.LENGTH: "length",
    PublicReason.ABORTED: "abort",
    PublicReason.ERROR: "error",
}


def chunk_to_proto(submission: Submission, delta: Delta) -> Any:
    """One piece: its tokens, and how many there are so far."""
    chunk = pb.GenerateStreamChunk(
        token_ids=delta.token_ids,
        completion_tokens=delta.token_offset + len(delta.token_ids),
        **_counts(submission, delta),
        **_logprobs(submission, delta),
    )
    return pb.GenerateResponse(chunk=chunk)


def end_to_proto(submission: Submission, delta: Delta) -> Any:
    """The end. `delta` is the whole answer where nothing was sent before, else the last piece, less the tokens that are sent already."""
    finish, reason = delta.finish, delta.public_reason
    assert finish is not None and reason is not None, "only the last piece has an end"
    complete = pb.GenerateComplete(
        output_ids=delta.token_ids,
        finish_reason=_REASONS[reason],
        completion_tokens=finish.output_len,
        **_counts(submission, delta),
        **_logprobs(submission, delta),
    )
    if finish.stop_string is not None:
        complete.matched_stop_str = finish.stop_string
    elif finish.stop_token_id is not None:
        complete.matched_token_id = finish.stop_token_id
    return pb.GenerateResponse(complete=complete)


def model_info_to_proto(served: Served, path: str) -> Any:
    """What is served. `path` is where the model lies on this machine; who cannot read it asks for the tokenizer."""
    info = served.model.info
    return pb.GetModelInfoResponse(
        model_path=path,
        tokenizer_path=path,
        is_generation=True,
        served_model_name=info.name,
        max_context_length=info.max_model_len,
        max_req_input_len=min(served.max_request_len, info.max_model_len) - 1,
        vocab_size=info.vocab_size,
        architectures=[info.architecture],
        eos_token_ids=info.eos_token_ids,
        bos_token_id=info.bos_token_id or 0,
    )


def load_to_proto(load: GroupLoad) -> Any:
    """The load as that of one rank. A request that is swapped out is to run again: it counts as waiting."""
    num_waiting = load.num_waiting + load.num_swapped
    return pb.SchedulerLoad(
        num_running_reqs=load.num_running,
        num_waiting_reqs=num_waiting,
        num_total_reqs=load.num_running + num_waiting,
        num_used_tokens=min(load.used_kv_tokens, INT32_MAX),
        max_total_num_tokens=min(load.total_kv_tokens, INT32_MAX),
        token_usage=load.used_kv_tokens / load.total_kv_tokens if load.total_kv_tokens else 0.0,
        gen_throughput=load.generation_tokens_per_s,
        cache_hit_rate=load.prefix_hit_rate,
        utilization=load.num_running / load.max_running if load.max_running else 0.0,
        max_running_requests=load.max_running,
        num_waiting_uncached_tokens=min(load.num_waiting_uncached_tokens, INT32_MAX),
    )


def load_record_to_proto(load: GroupLoad, age_ms: int, number: int, alone: bool) -> Any:
    """The same for the stream of events; what no router chooses by comes only with a record that is `alone`."""
    same = load_to_proto(load)
    record = common_pb2.EngineLoad(
        running_requests=same.num_running_reqs,
        waiting_requests=same.num_waiting_reqs,
        waiting_uncached_tokens=load.num_waiting_uncached_tokens,
        token_usage=same.token_usage,
        active_token_usage=same.token_usage,  # what the prefix cache alone keeps is not in it
        gen_throughput=same.gen_throughput,
        max_running_requests=same.max_running_requests,
        age_ms=age_ms,
        sample=number,
        load_only=alone,
    )
    if alone:
        record.cache_hit_rate = same.cache_hit_rate
        record.num_used_tokens, record.max_total_num_tokens = same.num_used_tokens, same.max_total_num_tokens
    return record


def _counts(submission: Submission, delta: Delta) -> dict[str, Any]:
    return {"prompt_tokens": len(submission.prompt_token_ids), "cached_tokens": delta.num_cached_tokens}


def _logprobs(submission: Submission, delta: Delta) -> dict[str, Any]:
    """Those of a delta that its request asked for; the first token of a prompt has none."""
    found: dict[str, Any] = {}
    if delta.logprobs is not None and delta.token_ids:
        found["output_logprobs"] = pb.OutputLogProbs()
        _fill(found["output_logprobs"], delta.logprobs)
    if delta.prompt_logprobs is not None:
        of_prompt = pb.InputLogProbs(
            token_logprobs=[pb.InputTokenLogProb()],
            token_ids=[int(submission.prompt_token_ids[0])],
            top_logprobs=[pb.TopLogProbs()],
        )
        values = pb.OutputLogProbs()
        _fill(values, delta.prompt_logprobs)
        of_prompt.token_logprobs.extend(pb.InputTokenLogProb(value=value) for value in values.token_logprobs)
        of_prompt.token_ids.extend(values.token_ids)
        of_prompt.top_logprobs.extend(values.top_logprobs)
        found["input_logprobs"] = of_prompt
    return found


def _fill(message: Any, logprobs: Logprobs) -> None:
    """Tokens whose log-probabilities were lost on the way are left out; every entry names its token."""
    for token_ids, values in _entries(logprobs):
        message.token_ids.append(token_ids[0])
        message.token_logprobs.append(values[0])
        message.top_logprobs.append(pb.TopLogProbs(token_ids=token_ids[1:], values=values[1:]))


def _entries(logprobs: Logprobs) -> Iterator[tuple[list[int], list[float]]]:
    """Ids and values of each token that has any: first its own, then those of the likeliest ids."""
    token_ids, values, end = logprobs.token_ids.tolist(), logprobs.logprobs.tolist(), 0
    for count in logprobs.counts.tolist():
        begin, end = end, end + count
        if count:
            yield token_ids[begin:end], values[begin:end]
