"""Journal records, and the state that results from applying them: what was promised."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kv_manager.published_block import PublishedBlock
from kv_manager.published_blocks import PublishedBlocks
from services.scheduler.core.block_map import BlockMap
from services.scheduler.core.kept_logprobs import KeptLogprobs
from services.scheduler.core.sequence_status import SequenceStatus
from tessera.values.finish import Finish
from tessera.values.logprobs import Logprobs
from tessera.values.request import RequestTimings, Submission


@dataclass(frozen=True, slots=True, order=True)
class Arrival:
    """Place in the queue, (epoch number, counter): never a clock."""

    epoch_number: int
    counter: int


@dataclass(frozen=True, slots=True)
class RequestDelta:
    """What changed of one request, absolute: applying it twice changes nothing more.

    `submission` and `arrival` come with the first delta of a request in a generation. Output tokens from `token_offset`
    on are replaced by `token_ids`, with their `logprobs` where the request wants them, blocks of the table from `table_offset` on by
    `block_ids`; the rest replaces what is stored, but `prompt_logprobs` only where they are told.
    """

    request_id: bytes
    status: SequenceStatus
    subscriber: int
    attempt: int
    worker: str  # empty while waiting
    token_offset: int
    token_ids: tuple[int, ...]
    table_offset: int
    block_ids: tuple[int, ...]
    num_cached_tokens: int = 0
    finish: Finish | None = None
    timings: RequestTimings = RequestTimings()
    submission: Submission | None = None
    arrival: Arrival | None = None
    tokens_max: int = 0  # see `StoredRequest`
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None  # of every prompt token but the first


@dataclass(frozen=True, slots=True, eq=False)
class DecodeColumns:
    """What a steady decode step changes, as columns: running requests that gained one output token and change in nothing
    else but, at most, a block at the end of their table. Absolute like a delta. An object per sequence and step would alone
    cost more than the journal's budget.

    - `request_ids[R]`; `token_offsets` int32 `[R]`, index of the token in the output; `token_ids` int32 `[R]`.
    - `grown_rows` int32 `[M]`, the rows whose table grew; `table_offsets` int32 `[M]`, index of the new block in the table;
      `block_ids` int32 `[M]`.
    - `logprobs` of the R tokens; None where no row's request wants any.
    """

    request_ids: tuple[bytes, ...]
    token_offsets: npt.NDArray[np.int32]
    token_ids: npt.NDArray[np.int32]
    grown_rows: npt.NDArray[np.int32]
    table_offsets: npt.NDArray[np.int32]
    block_ids: npt.NDArray[np.int32]
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class BlockDelta:
    """Prefix-cache entries that appeared and went, for one boot of one worker. Unpublishing applies first."""

    worker: str
    boot_id: bytes
    published: Sequence[PublishedBlock]
    unpublished: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """One numbered step of the journal. Numbers are dense. A request is in one of `requests` and `decoded`, not in both.

    Of `removed_workers` all blocks go, before `blocks` come.
    """

    number: int
    requests: tuple[RequestDelta, ...] = ()
    blocks: tuple[BlockDelta, ...] = ()
    forgotten: tuple[bytes, ...] = ()
    decoded: DecodeColumns | None = None
    removed_workers: tuple[str, ...] = ()


@dataclass(slots=True)
class StoredRequest:
    """One request as the journal tells it. Tokens and blocks are arrays of C ints: copying one is copying memory.

    `tokens_max` is the length, prompt and output, to which it was promised that it may grow; 0: nothing was. It holds whoever leads, and
    whatever pools there are then. `logprobs` are those of the output, `prompt_logprobs` those of every prompt token but the first; None where
    none were told.
    """

    submission: Submission
    arrival: Arrival
    status: SequenceStatus
    subscriber: int = 0
    attempt: int = 0
    worker: str = ""
    output_token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    block_ids: "array[int]" = field(default_factory=lambda: array("i"))
    num_cached_tokens: int = 0
    finish: Finish | None = None
    timings: RequestTimings = RequestTimings()
    tokens_max: int = 0
    logprobs: KeptLogprobs | None = None
    prompt_logprobs: Logprobs | None = None

    @property
    def num_logprobs(self) -> int:
        """Entries of log-probabilities, of prompt and output."""
        of_prompt = len(self.prompt_logprobs.token_ids) if self.prompt_logprobs is not None else 0
        return of_prompt + (self.logprobs.num_entries if self.logprobs is not None else 0)

    def apply(self, delta: RequestDelta) -> None:
        """Bring this request up to `delta`."""
        assert delta.token_offset <= len(self.output_token_ids), "a delta leaves a gap in the output"
        assert delta.table_offset <= len(self.block_ids), "a delta leaves a gap in the block table"
        self.cut(delta.token_offset)
        self.output_token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            self.put_logprobs(delta.token_offset, delta.logprobs)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        self.block_ids[delta.table_offset :] = array("i", delta.block_ids)
        self.status, self.subscriber, self.attempt, self.worker = delta.status, delta.subscriber, delta.attempt, delta.worker
        self.num_cached_tokens, self.finish, self.timings = delta.num_cached_tokens, delta.finish, delta.timings
        self.tokens_max = delta.tokens_max

    def cut(self, output_len: int) -> None:
        """Forget the output tokens from `output_len` on."""
        del self.output_token_ids[output_len:]
        if self.logprobs is not None:
            self.logprobs.cut(output_len)

    def put_logprobs(self, offset: int, logprobs: Logprobs) -> None:
        """Those of the output tokens from `offset` on."""
        if self.logprobs is None:
            self.logprobs = KeptLogprobs()
        self.logprobs.put(offset, logprobs)

    def copy(self) -> "StoredRequest":
        """This request as it is now."""
        return StoredRequest(
            self.submission,
            self.arrival,
            self.status,
            self.subscriber,
            self.attempt,
            self.worker,
            self.output_token_ids[:],
            self.block_ids[:],
            self.num_cached_tokens,
            self.finish,
            self.timings,
            self.tokens_max,
            self.logprobs.copy() if self.logprobs is not None else None,
            self.prompt_logprobs,
        )


def apply_run(rows: Sequence[StoredRequest | None], run: Sequence[DecodeColumns], skips: Sequence[int]) -> None:
    """Apply the columns of consecutive records, which all name the same requests. Many at once cost little more than one.

    `rows` are these requests, None for one that is not wanted; of row i the first `skips[i]` columns are not applied.
    """
    count, width = len(run), np.dtype(np.intc).itemsize
    offsets = np.stack([columns.token_offsets for columns in run], axis=1)
    starts = offsets[np.arange(len(rows)), np.minimum(skips, count - 1)].tolist()
    data = np.stack([columns.token_ids for columns in run], axis=1).astype(np.intc, copy=False).tobytes()
    end = 0
    for request, skip, start in zip(rows, skips, starts, strict=True):
        begin, end = end + skip * width, end + count * width
        if request is not None and skip < count:
            output = request.output_token_ids
            if len(output) != start:
                assert start < len(output), "columns leave a gap"
                request.cut(start)
            output.frombytes(data[begin:end])
    for index, columns in enumerate(run):
        if columns.logprobs is not None:
            _apply_logprobs([None if index < skip else row for row, skip in zip(rows, skips, strict=True)], columns)
        grown = zip(columns.grown_rows.tolist(), columns.table_offsets.tolist(), columns.block_ids.tolist(), strict=True)
        for row, offset, block_id in grown:
            request = rows[row]
            if request is not None and index >= skips[row]:
                table = request.block_ids
                if len(table) != offset:
                    assert offset < len(table), "columns leave a gap"
                    del table[offset:]
                table.append(block_id)


def _apply_logprobs(rows: Sequence[StoredRequest | None], columns: DecodeColumns) -> None:
    """Give each of these requests that wants some the log-probabilities of its token in these columns."""
    assert columns.logprobs is not None
    for row in np.flatnonzero(columns.logprobs.counts).tolist():
        request = rows[row]
        if request is not None:
            request.put_logprobs(int(columns.token_offsets[row]), columns.logprobs.between(row, row + 1))


@dataclass(slots=True)
class StoredState:
    """Everything the journal tells, up to record `last`."""

    last: int = 0
    requests: dict[bytes, StoredRequest] = field(default_factory=dict)
    blocks: dict[tuple[str, bytes], BlockMap] = field(default_factory=dict)

    def apply(self, record: Record) -> None:
        """Apply one record; a record at or below `last` is a no-op."""
        if record.number <= self.last:
            return
        self.apply_rare(record)
        if record.decoded is not None:
            self.apply_columns((record.decoded,))
        self.apply_blocks(record.blocks)

    def apply_rare(self, record: Record) -> None:
        """Apply all of the next record but what comes with every step, which is for `apply_columns` and `apply_blocks`."""
        for delta in record.requests:
            self._apply_request(delta)
        for request_id in record.forgotten:
            self.requests.pop(request_id, None)
        for worker in record.removed_workers:
            self._void_boots(worker)
        self.last = record.number

    def apply_all(self, records: Iterable[Record]) -> None:
        """Apply records in order."""
        for record in records:
            self.apply(record)

    def apply_columns(self, run: Sequence[DecodeColumns]) -> None:
        """Apply the columns of consecutive records, all of the same requests."""
        rows = [self.requests[request_id] for request_id in run[0].request_ids]
        apply_run(rows, run, [0] * len(rows))

    def apply_blocks(self, deltas: Sequence[BlockDelta]) -> dict[tuple[str, bytes], list[int]]:
        """Apply prefix-cache changes in order. Many at once cost little more than one. Returns the pages that they touch, per boot."""
        changes: dict[tuple[str, bytes], list[tuple[PublishedBlocks, Sequence[int]]]] = {}
        for delta in deltas:
            published = PublishedBlocks.of(delta.published)
            changes.setdefault((delta.worker, delta.boot_id), []).append((published, delta.unpublished))
        pages = {}
        for boot, of_boot in changes.items():
            if boot not in self.blocks:  # a worker has one boot at a time: entries of the one before are void
                self._void_boots(boot[0])
            pages[boot] = self.blocks.setdefault(boot, BlockMap()).apply_all(of_boot)
        return pages

    def _apply_request(self, delta: RequestDelta) -> None:
        request = self.requests.get(delta.request_id)
        if request is None:
            assert delta.submission is not None and delta.arrival is not None, "the first delta carries the submission"
            request = StoredRequest(delta.submission, delta.arrival, delta.status)
            self.requests[delta.request_id] = request
        request.apply(delta)

    def _void_boots(self, worker: str) -> None:
        for boot in [key for key in self.blocks if key[0] == worker]:
            del self.blocks[boot]
