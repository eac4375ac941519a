"""Journal values <-> the bytes that Redis keeps: protobuf messages of `tessera.scheduler.v1`, prefix-cache entries, and keys of hash fields.

`*_from_bytes` raises MalformedMessage or protobuf's DecodeError for bytes no scheduler wrote.
"""

import struct
from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from kv_manager.published_block import PublishedBlock
from services.scheduler.convert import submission_from_proto, submission_to_proto
from services.scheduler.core.journal_call import FoldedRequest
from services.scheduler.core.record import Arrival, DecodeColumns, StoredRequest
from services.scheduler.core.sequence_status import SequenceStatus
from services.worker.convert import MalformedMessage, column_from_bytes, column_to_bytes, finish_from_proto, finish_to_proto
from tessera.scheduler.v1 import journal_pb2, session_pb2
from tessera.values.identity import INSTANCE_ID_BYTES, REQUEST_ID_BYTES
from tessera.values.request import RequestTimings, Submission

SUBMISSION_TAG = b"s"
REQUEST_TAG = b"r"
"""First byte of a request's two fields; its id follows."""

_STATUS_TO_PROTO = {
    SequenceStatus.WAITING: journal_pb2.REQUEST_STATUS_WAITING,
    SequenceStatus.RUNNING: journal_pb2.REQUEST_STATUS_RUNNING,
    SequenceStatus.FINISHED: journal_pb2.REQUEST_STATUS_FINISHED,
}
_STATUS_FROM_PROTO = {number: status for status, number in _STATUS_TO_PROTO.items()}
_BLOCK_ID_BYTES = 4
_BLOCK_HEAD = "<QQQ?I"
_BLOCK_HEAD_BYTES = struct.calcsize(_BLOCK_HEAD)


def submission_to_bytes(submission: Submission) -> bytes:
    """Bytes of `submission`."""
    return submission_to_proto(submission).SerializeToString()


def submission_from_bytes(data: bytes) -> Submission:
    """What was asked."""
    return submission_from_proto(session_pb2.Submission.FromString(data))


def request_to_bytes(folded: FoldedRequest) -> bytes:
    """Bytes of a request without its submission."""
    request = folded.request
    message = journal_pb2.StoredRequest(
        as_of=folded.as_of,
        arrival=journal_pb2.Arrival(epoch_number=request.arrival.epoch_number, counter=request.arrival.counter),
        status=_STATUS_TO_PROTO[request.status],
        subscriber=request.subscriber,
        attempt=request.attempt,
        worker=request.worker,
        output_token_ids=_column(request.output_token_ids),
        block_ids=_column(request.block_ids),
        finish=None if request.finish is None else finish_to_proto(request.finish),
        num_cached_tokens=request.num_cached_tokens,
        queue_us=request.timings.queue_us,
        ttft_us=request.timings.ttft_us,
        total_us=request.timings.total_us,
    )
    return message.SerializeToString()


def request_from_bytes(data: bytes, submission: Submission) -> FoldedRequest:
    """The request whose submission is `submission`."""
    message = journal_pb2.StoredRequest.FromString(data)
    status = _STATUS_FROM_PROTO.get(message.status)
    if status is None:
        raise MalformedMessage(f"stored request: unknown status {message.status}")
    request = StoredRequest(
        submission=submission,
        arrival=Arrival(message.arrival.epoch_number, message.arrival.counter),
        status=status,
        subscriber=message.subscriber,
        attempt=message.attempt,
        worker=message.worker,
        output_token_ids=_array(message.output_token_ids, "output_token_ids"),
        block_ids=_array(message.block_ids, "block_ids"),
        num_cached_tokens=message.num_cached_tokens,
        finish=finish_from_proto(message.finish) if message.HasField("finish") else None,
        timings=RequestTimings(message.queue_us, message.ttft_us, message.total_us),
    )
    return FoldedRequest(message.as_of, request)


def columns_to_bytes(columns: DecodeColumns | None) -> bytes:
    """A log entry; empty where the record has no columns."""
    if columns is None:
        return b""
    message = journal_pb2.DecodeColumns(
        request_ids=b"".join(columns.request_ids),
        token_offsets=column_to_bytes(columns.token_offsets),
        token_ids=column_to_bytes(columns.token_ids),
        grown_rows=column_to_bytes(columns.grown_rows),
        table_offsets=column_to_bytes(columns.table_offsets),
        block_ids=column_to_bytes(columns.block_ids),
    )
    return message.SerializeToString()


def columns_from_bytes(data: bytes) -> DecodeColumns | None:
    """The columns of a log entry; None where its record has none. Their arrays are read-only."""
    if not data:
        return None
    message = journal_pb2.DecodeColumns.FromString(data)
    ids = message.request_ids
    columns = DecodeColumns(
        request_ids=tuple(ids[i : i + REQUEST_ID_BYTES] for i in range(0, len(ids), REQUEST_ID_BYTES)),
        token_offsets=column_from_bytes(message.token_offsets, "token_offsets"),
        token_ids=column_from_bytes(message.token_ids, "token_ids"),
        grown_rows=column_from_bytes(message.grown_rows, "grown_rows"),
        table_offsets=column_from_bytes(message.table_offsets, "table_offsets"),
        block_ids=column_from_bytes(message.block_ids, "block_ids"),
    )
    rows, grown = len(ids) / REQUEST_ID_BYTES, len(columns.grown_rows)
    if not (
        rows == len(columns.token_offsets) == len(columns.token_ids)
        and grown == len(columns.table_offsets) == len(columns.block_ids)
    ):
        raise MalformedMessage(f"log entry: columns of different lengths for {rows} requests and {grown} blocks")
    return columns


def block_keys(boot_id: bytes, block_ids: Iterable[int]) -> list[bytes]:
    """Fields of prefix-cache entries: block id as 4 little-endian bytes, then the boot id.

    20 bytes on purpose: of strings of 32 and more Lua hashes only some bytes, and a script that is handed thousands of keys which
    differ in the others takes seconds.
    """
    return [block_id.to_bytes(_BLOCK_ID_BYTES, "little") + boot_id for block_id in block_ids]


def blocks_to_fields(worker: str, boot_id: bytes, blocks: Sequence[PublishedBlock]) -> list[bytes]:
    """Field, value, field, value, ... of prefix-cache entries of one boot of a worker.

    A value is, little-endian: digest, parent (0 where there is none) and step, 8 bytes each; whether there is a parent, 1 byte; number of
    token ids, 4 bytes; the ids, 4 bytes each; the worker's address in UTF-8. No protobuf: a step of 256 sequences publishes 16 blocks,
    and messages would cost a fifth of what it may.
    """
    address = worker.encode()
    fields: list[bytes] = []
    for key, block in zip(block_keys(boot_id, (block.block_id for block in blocks)), blocks, strict=True):
        ids, parent = block.token_ids, block.parent
        head = (block.digest, parent or 0, block.published_step, parent is not None, len(ids))
        fields += (key, struct.pack(f"{_BLOCK_HEAD}{len(ids)}i", *head, *ids) + address)
    return fields


def block_from_bytes(key: bytes, data: bytes) -> tuple[str, bytes, PublishedBlock]:
    """Worker, boot id and entry from a field and its value."""
    try:
        digest, parent, step, has_parent, count = struct.unpack_from(_BLOCK_HEAD, data)
        token_ids = struct.unpack_from(f"<{count}i", data, _BLOCK_HEAD_BYTES)
        worker = data[_BLOCK_HEAD_BYTES + 4 * count :].decode()
    except (struct.error, UnicodeDecodeError) as error:
        raise MalformedMessage(f"prefix-cache entry: {error}") from error
    if len(key) != _BLOCK_ID_BYTES + INSTANCE_ID_BYTES:
        raise MalformedMessage(f"prefix-cache entry: a key of {len(key)} bytes")
    block_id = int.from_bytes(key[:_BLOCK_ID_BYTES], "little")
    block = PublishedBlock(block_id, digest, parent if has_parent else None, token_ids, step)
    return worker, key[_BLOCK_ID_BYTES:], block


def _column(values: "array[int]") -> bytes:
    return np.frombuffer(values, np.int32).astype("<i4", copy=False).tobytes()


def _array(data: bytes, field: str) -> "array[int]":
    return array("i", column_from_bytes(data, field).tolist())
