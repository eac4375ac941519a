"""The form in which the store keeps the journal: whole requests, and a short log of decode columns above them.

A steady decode step is one log entry. Everything else that happens to a request writes it whole, and so does, for a few
running requests per call in turn, the passing of time: that keeps the log short. A stored request says as of which record it is,
and log entries up to that record are not applied to it again.
"""

from collections.abc import Iterable, Iterator, Sequence

from kv_manager.published_block import PublishedBlock
from services.scheduler.core.journal_call import Append, FoldedRequest, Generation
from services.scheduler.core.record import BlockDelta, DecodeColumns, Record, StoredState, apply_run
from tessera.values.request import Submission

FOLD_CYCLE = 512
"""A running request is written whole about once in so many records. Longer means a longer log to read back, shorter
means more bytes per step."""

RUN_LEN_MAX = 64
"""So many records of columns wait at most to be applied together."""


def read_back(
    last: int,
    log: Sequence[DecodeColumns | None],
    folded: dict[bytes, FoldedRequest],
    blocks: dict[tuple[str, bytes], dict[int, PublishedBlock]],
) -> StoredState:
    """The state as of record `last`: `folded` with the log entries, which end at `last`, applied to it.

    Takes over and changes what it is given. A row of a request that is not there is skipped: the request was forgotten.
    """
    for first, run in _runs(log, last - len(log) + 1):
        items = [folded.get(request_id) for request_id in run[0].request_ids]
        rows = [None if item is None else item.request for item in items]
        apply_run(rows, run, [0 if item is None else max(0, item.as_of - first + 1) for item in items])
    return StoredState(last, {request_id: item.request for request_id, item in folded.items()}, blocks)


def _runs(log: Sequence[DecodeColumns | None], first: int) -> Iterator[tuple[int, list[DecodeColumns]]]:
    """The log, whose first entry is record `first`, cut into runs of consecutive columns of the same requests."""
    run: list[DecodeColumns] = []
    for number, columns in enumerate(log, first):
        if run and (columns is None or columns.request_ids != run[0].request_ids):
            yield number - len(run), run
            run = []
        if columns is not None:
            run.append(columns)
    if run:
        yield first + len(log) - len(run), run


class LogFolder:
    """The state as of the last record handed to the store, and which requests the log still tells more of than their stored form.

    `_unfolded` maps a request to the first record that its stored form may lack, in the order of that number. `_run` are
    columns of one set of requests that are not applied to the state yet: many at once cost little more than one.
    """

    def __init__(self, last_record: int) -> None:
        self._state = StoredState(last_record)
        self._run: list[DecodeColumns] = []
        self._unfolded: dict[bytes, int] = {}
        self._unfolded_ids: tuple[bytes, ...] = ()  # all of these are in _unfolded
        self._records_since_turn = 0

    def state(self) -> StoredState:
        """The state, not to be changed; it is valid until the next record."""
        if self._run:
            self._state.apply_columns(self._run)
            self._run.clear()
        return self._state

    def absorb(self, record: Record) -> None:
        """Apply a record; what it says in columns, later."""
        assert record.number == self._state.last + 1, "records must continue the state"
        columns = record.decoded
        ends_run = record.requests or record.forgotten or len(self._run) == RUN_LEN_MAX
        if ends_run or (self._run and columns is not None and columns.request_ids != self._run[0].request_ids):
            self.state()
        self._state.apply(Record(record.number, record.requests, record.blocks, record.forgotten, None, record.removed_workers))
        if columns is not None:
            self._run.append(columns)

    def rewritten(self) -> None:
        """The whole state was handed to the store: no request is unfolded."""
        self._unfolded.clear()
        self._unfolded_ids = ()

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
        if touched or self._records_since_turn >= RUN_LEN_MAX:  # the state is brought up to date anyway
            touched.update(dict.fromkeys(self._take_turns()))
        requests = self.state().requests if touched else {}
        return Append(
            generation=generation,
            first=records[0].number,
            log=tuple(record.decoded for record in records),
            submissions=tuple(submissions.values()),
            requests=tuple(FoldedRequest(last, requests[request_id].copy()) for request_id in touched),
            forgotten=tuple(forgotten),
            blocks=_net_blocks(records),
            log_from=next(iter(self._unfolded.values()), last + 1),
        )

    def _mark_unfolded(self, request_ids: tuple[bytes, ...], number: int) -> None:
        if request_ids == self._unfolded_ids:  # the steady case, at the price of 256 pointer comparisons
            return
        for request_id in request_ids:
            self._unfolded.setdefault(request_id, number)
        self._unfolded_ids = request_ids

    def _mark_folded(self, request_id: bytes) -> None:
        if self._unfolded.pop(request_id, None) is not None:
            self._unfolded_ids = ()

    def _take_turns(self) -> list[bytes]:
        """The requests whose turn it is to be written whole: the longest unfolded ones, as many as take every one once per cycle."""
        count = -(-len(self._unfolded) * self._records_since_turn // FOLD_CYCLE)
        self._records_since_turn = 0
        turns = zip(range(count), self._unfolded.items(), strict=False)
        due = [request_id for _, (request_id, first_missing) in turns if first_missing <= self._state.last]
        for request_id in due:
            del self._unfolded[request_id]
            self._unfolded[request_id] = self._state.last + 1
        return due


def _net_blocks(records: Iterable[Record]) -> tuple[BlockDelta, ...]:
    """The net effect of all block deltas, one per boot of a worker."""
    deltas = [delta for record in records for delta in record.blocks]
    if len(deltas) <= 1:
        return tuple(deltas)
    net: dict[tuple[str, bytes], dict[int, PublishedBlock | None]] = {}
    for delta in deltas:
        entries = net.setdefault((delta.worker, delta.boot_id), {})
        entries.update(dict.fromkeys(delta.unpublished))
        entries.update((block.block_id, block) for block in delta.published)
    return tuple(
        BlockDelta(
            worker,
            boot_id,
            tuple(block for block in entries.values() if block is not None),
            tuple(block_id for block_id, block in entries.items() if block is None),
        )
        for (worker, boot_id), entries in net.items()
    )
