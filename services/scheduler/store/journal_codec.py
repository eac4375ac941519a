"""Journal values <-> the bytes that Redis keeps: protobuf messages of `tessera.scheduler.v1` for requests, packed columns for what comes with
every step (messages of that would cost a fifth of what it may), and names of hash fields.

`*_from_bytes` raises MalformedMessage or protobuf's DecodeError for bytes no scheduler wrote.
"""

import struct
from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from kv_manager.published_blocks import PublishedBlocks, Rows, entry_dtype
from services.scheduler.convert import submission_to_proto, submission_with_prompt
from services.scheduler.core.block_map import BlockPage
from services.scheduler.core.journal_call import FoldedRequest, LogEntry
from services.scheduler.core.record import Arrival, BlockDelta, DecodeColumns, StoredRequest
from services.scheduler.core.sequence_status import SequenceStatus
from services.worker.convert import MalformedMessage, column_from_bytes, finish_from_proto, finish_to_proto
from services.worker.convert_logprobs import kept_logprobs_from_proto, logprobs_to_proto
from tessera.scheduler.v1 import journal_pb2, session_pb2
from tessera.values.identity import INSTANCE_ID_BYTES, REQUEST_ID_BYTES
from tessera.values.logprobs import Logprobs
from tessera.values.request import RequestTimings, Submission

SUBMISSION_TAG = b"s"
REQUEST_TAG = b"r"
"""First byte of a request's two fields; its id follows."""

_STATUS_TO_PROTO = {
    SequenceStatus.WAITING: journal_pb2.REQUEST_STATUS_WAITING,
    SequenceStatus.RUNNING: journal_pb2.REQUEST_STATUS_RUNNING,
    SequenceStatus.SWAPPED: journal_pb2.REQUEST_STATUS_SWAPPED,
    SequenceStatus.FINISHED: journal_pb2.REQUEST_STATUS_FINISHED,
    SequenceStatus.ABORTED: journal_pb2.REQUEST_STATUS_ABORTED,
}
_STATUS_FROM_PROTO = {number: status for status, number in _STATUS_TO_PROTO.items()}
_INDEX_BYTES = 4
_PAGE_HEAD = struct.Struct("<QHH")
_COLUMNS, _KEY, _LOGPROBS = 1, 2, 4
_COLUMNS_HEAD = struct.Struct("<II")
_DELTA_HEAD = struct.Struct("<HHII")


def submission_to_bytes(submission: Submission) -> bytes:
    """Bytes of `submission`: the length of its message (4 bytes, little-endian), the message without the prompt, the prompt's ids (int32). A
    takeover reads a hundred times as many ids as anything else, and decoding them one by one would take it half of its time."""
    message = submission_to_proto(submission, with_prompt=False).SerializeToString()
    return len(message).to_bytes(4, "little") + message + _int32(submission.prompt_token_ids)


def submission_from_bytes(data: bytes) -> Submission:
    """What was asked. The prompt's array is read-only."""
    start = 4 + int.from_bytes(data[:4], "little")
    prompt = column_from_bytes(data[start:], "prompt_token_ids")
    if not len(prompt) or prompt.min() < 0:
        raise MalformedMessage("stored submission: no prompt, or one with a negative id")
    return submission_with_prompt(session_pb2.Submission.FromString(data[4:start]), prompt)


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
        num_preemptions=request.timings.num_preemptions,
        tokens_max=request.tokens_max,
    )
    if request.logprobs is not None:
        message.logprobs.CopyFrom(logprobs_to_proto(request.logprobs.read(0, len(request.logprobs))))
    if request.prompt_logprobs is not None:
        message.prompt_logprobs.CopyFrom(logprobs_to_proto(request.prompt_logprobs))
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
        timings=RequestTimings(message.queue_us, message.ttft_us, message.total_us, message.num_preemptions),
        tokens_max=message.tokens_max,
    )
    if message.HasField("logprobs"):
        request.put_logprobs(0, kept_logprobs_from_proto(message.logprobs, "logprobs"))
    if message.HasField("prompt_logprobs"):
        request.prompt_logprobs = kept_logprobs_from_proto(message.prompt_logprobs, "prompt_logprobs")
    return FoldedRequest(message.as_of, request)


def page_to_field(page: BlockPage) -> tuple[bytes, bytes]:
    """Field and value of a page. The field is its index as 4 little-endian bytes, then the boot id; the value as of which record it is (8
    bytes), block size and length of the worker's name (2 each), that name in UTF-8, and the entries' rows.

    20 bytes on purpose: of strings of 32 and more Lua hashes only some bytes, and a script that is handed thousands of fields which
    differ in the others takes seconds.
    """
    worker, rows = page.worker.encode(), page.entries.rows
    head = _PAGE_HEAD.pack(page.as_of, _block_size(rows), len(worker))
    return page.index.to_bytes(_INDEX_BYTES, "little") + page.boot_id, head + worker + rows.tobytes()


def page_from_field(field: bytes, data: bytes) -> BlockPage:
    """The page of a field and its value."""
    try:
        as_of, block_size, worker_len = _PAGE_HEAD.unpack_from(data)
        start = _PAGE_HEAD.size + worker_len
        worker = data[_PAGE_HEAD.size : start].decode()
        rows = np.frombuffer(data, entry_dtype(block_size), offset=start)
    except (struct.error, ValueError) as error:
        raise MalformedMessage(f"page of blocks: {error}") from error
    if len(field) != _INDEX_BYTES + INSTANCE_ID_BYTES:
        raise MalformedMessage(f"page of blocks: a field of {len(field)} bytes")
    index = int.from_bytes(field[:_INDEX_BYTES], "little")
    return BlockPage(as_of, worker, field[_INDEX_BYTES:], index, PublishedBlocks(rows))


def log_to_bytes(entry: LogEntry) -> bytes:
    """A log entry; empty where the record changes neither columns nor blocks.

    Little-endian: what follows (`_COLUMNS`, `_KEY`, `_LOGPROBS`), 1 byte; of columns the numbers of requests and grown rows, 4 each, for a key
    ids (16 each) and offsets, then tokens, grown rows, table offsets and block ids, 4 each, and where some want log-probabilities their
    counts and ranks, the entries' token ids, and the entries (float32). Then for each boot of a worker lengths of its name and blocks, 2
    each, numbers of unpublished blocks and of rows, 4 each, name, boot id, unpublished block ids, rows.
    """
    columns = entry.decoded
    if columns is None and not entry.blocks:
        return b""
    flags = 0
    if columns is not None:
        flags = _COLUMNS | _KEY * entry.is_key | _LOGPROBS * (columns.logprobs is not None)
    parts = [bytes((flags,))]
    if columns is not None:
        parts.append(_COLUMNS_HEAD.pack(len(columns.request_ids), len(columns.grown_rows)))
        if entry.is_key:
            parts += (b"".join(columns.request_ids), _int32(columns.token_offsets))
        tail = (columns.token_ids, columns.grown_rows, columns.table_offsets, columns.block_ids)
        parts += [_int32(column) for column in tail]
        if columns.logprobs is not None:
            parts += _logprobs_parts(columns.logprobs)
    for delta in entry.blocks:
        worker, rows = delta.worker.encode(), PublishedBlocks.of(delta.published).rows
        parts.append(_DELTA_HEAD.pack(len(worker), _block_size(rows), len(delta.unpublished), len(rows)))
        parts += (worker, delta.boot_id, np.array(delta.unpublished, "<i4").tobytes(), rows.tobytes())
    return b"".join(parts)


def log_from_bytes(log: Iterable[bytes]) -> list[LogEntry]:
    """The entries of a log, from its first on. Their arrays are read-only."""
    entries: list[LogEntry] = []
    before: DecodeColumns | None = None
    for data in log:
        try:
            entry = _Reader(data).log_entry(before) if data else LogEntry()
        except (struct.error, ValueError) as error:
            raise MalformedMessage(f"log entry: {error}") from error
        before = entry.decoded or before
        entries.append(entry)
    return entries


class _Reader:
    """Takes one log entry apart. Raises struct.error or ValueError where it is not one."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def log_entry(self, before: DecodeColumns | None) -> LogEntry:
        """The whole; `before` are the columns before it in the log."""
        (flags,) = self._bytes(1)
        columns = self._columns(flags, before) if flags & _COLUMNS else None
        deltas = []
        while self._at < len(self._data):
            deltas.append(self._delta())
        return LogEntry(columns, bool(flags & _KEY), tuple(deltas))

    def _columns(self, flags: int, before: DecodeColumns | None) -> DecodeColumns:
        num_rows, num_grown = _COLUMNS_HEAD.unpack(self._bytes(_COLUMNS_HEAD.size))
        if flags & _KEY:
            ids = self._bytes(num_rows * REQUEST_ID_BYTES)
            request_ids = tuple(ids[i : i + REQUEST_ID_BYTES] for i in range(0, len(ids), REQUEST_ID_BYTES))
            token_offsets = self._array("<i4", num_rows)
        elif before is not None and len(before.request_ids) == num_rows:
            request_ids, token_offsets = before.request_ids, before.token_offsets + np.int32(1)
        else:
            raise ValueError(f"{num_rows} tokens of requests that are not named before")
        token_ids = self._array("<i4", num_rows)
        rows, table_offsets, block_ids = (self._array("<i4", num_grown) for _ in range(3))
        logprobs = self._logprobs(num_rows) if flags & _LOGPROBS else None
        return DecodeColumns(request_ids, token_offsets, token_ids, rows, table_offsets, block_ids, logprobs)

    def _logprobs(self, num_tokens: int) -> Logprobs:
        counts, ranks = self._array("<i4", num_tokens), self._array("<i4", num_tokens)
        if num_tokens and counts.min() < 0:
            raise ValueError(f"a token with {counts.min()} log-probabilities")
        num_entries = int(counts.sum())
        return Logprobs(counts, self._array("<i4", num_entries), self._array("<f4", num_entries), ranks)

    def _delta(self) -> BlockDelta:
        head = _DELTA_HEAD.unpack(self._bytes(_DELTA_HEAD.size))
        worker_len, block_size, num_unpublished, num_rows = head
        worker, boot_id = self._bytes(worker_len).decode(), self._bytes(INSTANCE_ID_BYTES)
        unpublished = tuple(self._array("<i4", num_unpublished).tolist())
        return BlockDelta(worker, boot_id, PublishedBlocks(self._array(entry_dtype(block_size), num_rows)), unpublished)

    def _bytes(self, count: int) -> bytes:
        start, self._at = self._at, self._at + count
        if self._at > len(self._data):
            raise ValueError(f"{len(self._data)} bytes, cut off")
        return self._data[start : self._at]

    def _array(self, dtype: Any, count: int) -> npt.NDArray[Any]:
        return np.frombuffer(self._bytes(count * np.dtype(dtype).itemsize), dtype)


def _block_size(rows: Rows) -> int:
    size: int = rows.dtype["token_ids"].shape[0]
    return size


def _logprobs_parts(logprobs: Logprobs) -> list[bytes]:
    ids, entries = _int32(logprobs.token_ids), logprobs.logprobs.astype("<f4", copy=False).tobytes()
    return [_int32(logprobs.counts), _int32(logprobs.ranks), ids, entries]


def _int32(column: npt.NDArray[np.int32]) -> bytes:
    return column.astype("<i4", copy=False).tobytes()


def _column(values: "array[int]") -> bytes:
    return np.frombuffer(values, np.int32).astype("<i4", copy=False).tobytes()


def _array(data: bytes, field: str) -> "array[int]":
    values = array("i")
    values.frombytes(column_from_bytes(data, field).astype(np.intc, copy=False).tobytes())
    return values
