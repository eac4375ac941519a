"""The form in which the store keeps the journal: whole requests and pages of blocks, and a short log above them.

A step is one log entry: columns of decoded tokens, and the prefix-cache entries that came and went. Everything else that happens to a
request writes it whole, and so does, for a few running requests and changed pages per call in turn, the passing of time: that keeps the log
short. A stored request or page says as of which record it is, and log entries up to that record are not applied to it again.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from kv_manager.published_blocks import PublishedBlocks
from services.scheduler.core.block_map import PAGE_BLOCKS, BlockMap, BlockPage
from services.scheduler.core.journal_call import Append, FoldedRequest, Generation, LogEntry
from services.scheduler.core.record import BlockDelta, DecodeColumns, Record, StoredState, apply_run
from tessera.values.request import Submission

FOLD_CYCLE = 384
"""A running request, and a page that changes, is written whole about once in so many records. Longer means more memory for the log and more
to read back, shorter means more bytes per step."""

KEY_CYCLE = 32
"""The log names requests and offsets at least once in so many records."""

RUN_LEN_MAX = 64
"""So many records of columns wait at most to be applied together."""


def read_back(
    last: int, log: Sequence[LogEntry], folded: dict[bytes, FoldedRequest], pages: Iterable[BlockPage]
) -> StoredState:
    """The state as of record `last`: `folded` and `pages` with the log entries, which end at `last`, applied to them.

    Takes over and changes what it is given. A row of a request that is not there is skipped: the request was forgotten.
    """
    first_number = last - len(log) + 1
    for first, run in _runs(log, first_number):
        items = [folded.get(request_id) for request_id in run[0].request_ids]
        rows = [None if item is None else item.request for item in items]
        apply_run(rows, run, [0 if item is None else max(0, item.as_of - first + 1) for item in items])
    requests = {request_id: item.request for request_id, item in folded.items()}
    return StoredState(last, requests, _read_blocks(log, first_number, pages))


def _read_blocks(log: Sequence[LogEntry], first: int, pages: Iterable[BlockPage]) -> dict[tuple[str, bytes], BlockMap]:
    """`pages` with the block changes of `log`, whose first entry is record `first`."""
    as_of: dict[tuple[str, bytes], dict[int, int]] = {}
    parts: dict[tuple[str, bytes], list[PublishedBlocks]] = {}
    for page in pages:
        as_of.setdefault((page.worker, page.boot_id), {})[page.index] = page.as_of
        parts.setdefault((page.worker, page.boot_id), []).append(page.entries)
    blocks = {boot: BlockMap() for boot in parts}
    for boot, entries in parts.items():
        blocks[boot].apply(PublishedBlocks.concatenate(entries), ())
    for number, entry in enumerate(log, first):
        for delta in entry.blocks:
            boot = (delta.worker, delta.boot_id)
            ages, published = as_of.get(boot, {}), PublishedBlocks.of(delta.published)
            unpublished = np.array(delta.unpublished, np.int64)
            fresh = [_is_below(number, ages, block_ids) for block_ids in (published.block_ids, unpublished)]
            blocks.setdefault(boot, BlockMap()).apply(published.select(fresh[0]), unpublished[fresh[1]])
    return blocks


def _is_below(number: int, ages: dict[int, int], block_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which blocks lie in pages that are as of a record below `number`."""
    return np.array([ages.get(page, 0) < number for page in (block_ids // PAGE_BLOCKS).tolist()], np.bool_)


def _runs(log: Sequence[LogEntry], first: int) -> Iterator[tuple[int, list[DecodeColumns]]]:
    """The log, whose first entry is record `first`, cut into runs of consecutive columns of the same requests."""
    run: list[DecodeColumns] = []
    for number, columns in enumerate((entry.decoded for entry in log), first):
        if run and (columns is None or columns.request_ids != run[0].request_ids):
            yield number - len(run), run
            run = []
        if columns is not None:
            run.append(columns)
    if run:
        yield first + len(log) - len(run), run


class LogFolder:
    """The state as of the last record handed to the store, and what of it the log still tells more of than its stored form.

    `_unfolded` maps a request, and `_unfolded_pages` for each boot of a worker a page, to a record not above the first that its stored
    form may lack, in the order of that number. `_keys` are the records of the log with ids and offsets. `_run` are columns of one set of requests that
    are not applied to the state yet, and `_block_changes` likewise: many at once cost little more than one.
    """

    def __init__(self, last_record: int) -> None:
        self._state = StoredState(last_record)
        self._run: list[DecodeColumns] = []
        self._block_changes: list[BlockDelta] = []
        self._block_changes_from = 0  # record of the first of them
        self._unfolded: dict[bytes, int] = {}
        self._unfolded_ids: tuple[bytes, ...] = ()  # all of these are in _unfolded
        self._unfolded_pages: dict[tuple[str, bytes], dict[int, int]] = {}
        self._keys: deque[int] = deque()
        self._last_columns: DecodeColumns | None = None
        self._records_since_turn = 0

    def state(self) -> StoredState:
        """The state, not to be changed; it is valid until the next record."""
        if self._run:
            self._state.apply_columns(self._run)
            self._run.clear()
        if self._block_changes:
            for boot, pages in self._state.apply_blocks(self._block_changes).items():
                unfolded = self._unfolded_pages.setdefault(boot, {})
                unfolded.update(dict.fromkeys((page for page in pages if page not in unfolded), self._block_changes_from))
            self._block_changes.clear()
        return self._state

    def absorb(self, record: Record) -> None:
        """Apply a record; what it says in columns, and of blocks, later."""
        assert record.number == self._state.last + 1, "records must continue the state"
        columns = record.decoded
        ends_run = record.requests or record.forgotten or record.removed_workers
        is_full = max(len(self._run), len(self._block_changes)) >= RUN_LEN_MAX
        if ends_run or is_full or (self._run and columns is not None and columns.request_ids != self._run[0].request_ids):
            self.state()
        self._state.apply_rare(record)
        if record.blocks and not self._block_changes:
            self._block_changes_from = record.number
        self._block_changes += record.blocks
        if columns is not None:
            self._run.append(columns)

    def rewritten(self) -> None:
        """The whole state was handed to the store: nothing is unfolded, and its log is empty."""
        self._unfolded.clear()
        self._unfolded_ids = ()
        self._unfolded_pages.clear()
        self._keys.clear()
        self._last_columns = None

    def append(self, generation: Generation, records: Sequence[Record]) -> Append:
        """Apply `records`, which continue the state, and say how the store is to keep them."""
        submissions: dict[bytes, Submission] = {}
        touched: dict[bytes, None] = {}  # to be written whole
        forgotten: dict[bytes, None] = {}
        for record in records:
            self.absorb(record)
            for delta in record.requests:
                forgotten.pop(delta.request_id, None)
                touched[delta.request_id] = None
                if delta.submission is not None:
                    submissions[delta.request_id] = delta.submission
            if record.decoded is not None:
                self._mark_unfolded(record.decoded.request_ids, record.number)
            for request_id in record.forgotten:
                submissions.pop(request_id, None)
                touched.pop(request_id, None)
                self._mark_folded(request_id)
                forgotten[request_id] = None
        for request_id in touched:
            self._mark_folded(request_id)
        last = self._state.last
        self._records_since_turn += len(records)
        pages: list[BlockPage] = []
        if not self._state.requests:
            pages = self._take_page_turns(FOLD_CYCLE)  # nobody runs: leave no log behind
            self._records_since_turn = 0
        elif touched or self._records_since_turn >= RUN_LEN_MAX:  # the state is brought up to date anyway
            pages = self._take_page_turns(self._records_since_turn)
            touched.update(dict.fromkeys(self._take_turns()))
        requests = self.state().requests if touched else {}
        return Append(
            generation=generation,
            first=records[0].number,
            log=tuple(self._log_entry(record) for record in records),
            submissions=tuple(submissions.values()),
            requests=tuple(FoldedRequest(last, requests[request_id].copy()) for request_id in touched),
            forgotten=tuple(forgotten),
            pages=tuple(pages),
            log_from=self._log_from(),
        )

    def _log_entry(self, record: Record) -> LogEntry:
        """Whether columns are a key depends on the records alone, so that the log is the same however they were sent."""
        if record.requests or record.forgotten:
            self._last_columns = None  # a request may have moved by more than a token
        columns, before = record.decoded, self._last_columns
        if columns is None:
            return LogEntry(blocks=record.blocks)
        is_key = (
            before is None
            or record.number % KEY_CYCLE == 0
            or columns.request_ids != before.request_ids
            or columns.token_offsets.tobytes() != (before.token_offsets + np.int32(1)).tobytes()
        )
        self._last_columns = columns
        if is_key:
            self._keys.append(record.number)
        return LogEntry(columns, is_key, record.blocks)

    def _log_from(self) -> int:
        """The first record that a reader needs: one that something stored may lack, or the key before it or before what comes."""
        after = self._state.last + 1
        first = self._block_changes_from if self._block_changes else after
        first = min(first, next(iter(self._unfolded.values()), after))
        for pages in self._unfolded_pages.values():
            first = min(first, next(iter(pages.values()), after))
        if first == after and self._last_columns is None:
            self._keys.clear()
            return after
        while len(self._keys) > 1 and self._keys[1] <= first:
            self._keys.popleft()
        return min(first, self._keys[0]) if self._keys else first

    def _mark_unfolded(self, request_ids: tuple[bytes, ...], number: int) -> None:
        if request_ids == self._unfolded_ids:  # the steady case, at the price of 256 pointer comparisons
            return
        for request_id in request_ids:
            self._unfolded.setdefault(request_id, number)
        self._unfolded_ids = request_ids

    def _mark_folded(self, request_id: bytes) -> None:
        if self._unfolded.pop(request_id, None) is not None:
            self._unfolded_ids = ()

    def _take_page_turns(self, num_records: int) -> list[BlockPage]:
        """The pages whose turn it is after so many records, as `_take_turns` has requests."""
        pages, state = [], self.state()
        for (worker, boot_id), unfolded in self._unfolded_pages.items():
            blocks = state.blocks[worker, boot_id]
            due = list(islice(unfolded, -(-len(unfolded) * num_records // FOLD_CYCLE)))
            for index in due:
                del unfolded[index]
                pages.append(BlockPage(self._state.last, worker, boot_id, index, blocks.page(index)))
        return pages

    def _take_turns(self) -> list[bytes]:
        """The requests whose turn it is to be written whole: the longest unfolded ones, as many as take every one once per cycle."""
        count = -(-len(self._unfolded) * self._records_since_turn // FOLD_CYCLE)
        self._records_since_turn = 0
        turns = islice(self._unfolded.items(), count)
        due = [request_id for request_id, first_missing in turns if first_missing <= self._state.last]
        for request_id in due:
            del self._unfolded[request_id]
            self._unfolded[request_id] = self._state.last + 1
        return due
