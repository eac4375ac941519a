"""Protobuf <-> values of frames: outputs as columns, and beside them what few of them have."""

from collections.abc import Sequence
from dataclasses import replace

from services.worker.convert import MalformedMessage, finish_from_proto, finish_to_proto
from services.worker.convert_logprobs import kept_logprobs_from_proto, logprobs_from_proto, logprobs_to_proto
from tessera.scheduler.v1 import session_pb2
from tessera.values.identity import REQUEST_ID_BYTES
from tessera.values.output_columns import OutputColumns
from tessera.values.request import RequestOutput, RequestTimings
from tessera.values.session import Frame


def fill_frame(message: session_pb2.Frame, outputs: Sequence[RequestOutput]) -> None:
    """Write `outputs` into an empty frame as columns."""
    columns = outputs if isinstance(outputs, OutputColumns) else OutputColumns.of(outputs)
    message.request_ids = b"".join(columns.request_ids)
    message.subscribers.extend(columns.subscribers.tolist())
    message.token_offsets.extend(columns.token_offsets.tolist())
    message.token_counts.extend(columns.token_counts.tolist())
    message.token_ids.extend(columns.token_ids.tolist())
    for index, output in columns.rare.items():
        if output.finish is not None:
            timings = output.timings or RequestTimings()
            message.ends.add(
                index=index,
                finish=finish_to_proto(output.finish),
                num_cached_tokens=output.num_cached_tokens,
                queue_us=timings.queue_us,
                ttft_us=timings.ttft_us,
                total_us=timings.total_us,
                num_preemptions=timings.num_preemptions,
            )
        if output.prompt_logprobs is not None:
            message.prompt_logprobs.add(index=index, logprobs=logprobs_to_proto(output.prompt_logprobs))
    if columns.logprobs is not None:
        message.logprobs.CopyFrom(logprobs_to_proto(columns.logprobs))


def frame_from_proto(message: session_pb2.Frame) -> Frame:
    """The outputs of a frame; columns of different lengths are malformed."""
    ids, counts, token_ids = message.request_ids, list(message.token_counts), list(message.token_ids)
    count = len(counts)
    columns = (len(ids) / REQUEST_ID_BYTES, len(message.subscribers), len(message.token_offsets))
    if columns != (count, count, count) or sum(counts) != len(token_ids):
        raise MalformedMessage(f"frame: columns of {columns} for {count} requests, {len(token_ids)} tokens for {sum(counts)}")
    outputs, start = [], 0
    rows = zip(message.subscribers, message.token_offsets, counts, strict=True)
    for index, (subscriber, token_offset, token_count) in enumerate(rows):
        request_id = ids[index * REQUEST_ID_BYTES : (index + 1) * REQUEST_ID_BYTES]
        outputs.append(RequestOutput(request_id, subscriber, token_offset, tuple(token_ids[start : start + token_count])))
        start += token_count
    for end in message.ends:
        if end.index >= count:
            raise MalformedMessage(f"frame.ends: index {end.index} of {count} requests")
        outputs[end.index] = _ended(outputs[end.index], end)
    _add_logprobs(message, counts, outputs)
    return Frame(tuple(outputs))


def _add_logprobs(message: session_pb2.Frame, counts: list[int], outputs: list[RequestOutput]) -> None:
    """Those of the outputs' tokens, and of prompts."""
    if message.HasField("logprobs"):
        logprobs = logprobs_from_proto(message.logprobs, sum(counts), "frame.logprobs")
        for index, own in enumerate(logprobs.split(counts)):
            if own.counts.any():
                outputs[index] = replace(outputs[index], logprobs=own)
    for prompt in message.prompt_logprobs:
        if prompt.index >= len(outputs):
            raise MalformedMessage(f"frame.prompt_logprobs: index {prompt.index} of {len(outputs)} requests")
        told = kept_logprobs_from_proto(prompt.logprobs, "frame.prompt_logprobs")
        outputs[prompt.index] = replace(outputs[prompt.index], prompt_logprobs=told)


def _ended(output: RequestOutput, end: session_pb2.RequestEnd) -> RequestOutput:
    return replace(
        output,
        num_cached_tokens=end.num_cached_tokens,
        finish=finish_from_proto(end.finish),
        timings=RequestTimings(end.queue_us, end.ttft_us, end.total_us, end.num_preemptions),
    )
