"""The form in which the store keeps the journal: whole requests, and a short log of decode columns above them.

A steady decode step is one log entry. Everything else that happens to a request writes it whole, and so does, for a few
running requests per call in turn, the passing of time: that keeps the log short. A stored request says as of which record it is,
and log entries up to that record are not applied to it again.
"""

from collections.abc import Iterable, Sequence

from kv_manager.published_block import PublishedBlock
from services.scheduler.core.journal_call import Append, FoldedRequest, Generation
from services.scheduler.core.record import BlockDelta, DecodeColumns, Record, StoredState, put_last
from tessera.values.request import Submission

FOLD_CYCLE = 256
"""A running request is written whole about once in so many records. Longer means a longer log to read back, shorter
means more bytes per step."""


def read_back(
    last: int,
    log: Sequence[DecodeColumns | None],
    folded: dict[bytes, FoldedRequest],
    blocks: dict[tuple[str, bytes], dict[int, PublishedBlock]],
) -> StoredState:
    """The state as of record `last`: `folded` with the log entries, which end at `last`, applied to it.

    Takes over and changes what it is given. A row of a request that is not there is skipped: the request was forgotten.
    """
    for number, columns in enumerate(log, last - len(log) + 1):
        if columns is None:
            continue
        rows = [folded.get(request_id) for request_id in columns.request_ids]
        tokens = zip(rows, columns.token_offsets.tolist(), columns.token_ids.tolist(), strict=True)
        for item, offset, token_id in tokens:
            if item is not None and item.as_of < number:
                put_last(item.request.output_token_ids, offset, token_id)
        grown = zip(columns.grown_rows.tolist(), columns.table_offsets.tolist(), columns.block_ids.tolist(), strict=True)
        for row, offset, block_id in grown:
            item = rows[row]
            if item is not None and item.as_of < number:
                put_last(item.request.block_ids, offset, block_id)
    return StoredState(last, {request_id: item.request for request_id, item in folded.items()}, blocks)


class LogFolder:
    """The state as of the last record handed to the store, and which requests the log still tells more of than their stored form.

    `_unfolded` maps a request to the first record that its stored form may lack. Its order is by that number.
    """

    def __init__(self, last_record: int) -> None:
        self.state = StoredState(last_record)
        self._unfolded: dict[bytes, int] = {}
        self._columns_ids: tuple[bytes, ...] = ()  # all of these are in _unfolded

    def absorb(self, record: Record) -> None:
        """Apply a record that will reach the store only as part of a rewrite."""
        self.state.apply(record)

    def rewritten(self) -> None:
        """The whole state was handed to the store: no request is unfolded."""
        self._unfolded.clear()
        self._columns_ids = ()

    def append(self, generation: Generation, records: Sequence[Record]) -> Append:
        """Apply `records`, which continue the state, and say how the store is to keep them."""
        assert records[0].number == self.state.last + 1, "records must continue the state"
        submissions: dict[bytes, Submission] = {}
        touched: dict[bytes, None] = {}  # to be written whole
        forgotten: dict[bytes, None] = {}
        for record in records:
            self.state.apply(record)
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
        last = self.state.last
        for request_id in self._due(len(records)):
            touched[request_id] = None
            del self._unfolded[request_id]
            self._unfolded[request_id] = last + 1
        return Append(
            generation=generation,
            first=records[0].number,
            log=tuple(record.decoded for record in records),
            submissions=tuple(submissions.values()),
            requests=tuple(FoldedRequest(last, self.state.requests[request_id].copy()) for request_id in touched),
            forgotten=tuple(forgotten),
            blocks=_net_blocks(records),
            log_from=next(iter(self._unfolded.values()), last + 1),
        )

    def _mark_unfolded(self, request_ids: tuple[bytes, ...], number: int) -> None:
        if request_ids == self._columns_ids:  # the steady case, at the price of 256 pointer comparisons
            return
        for request_id in request_ids:
            self._unfolded.setdefault(request_id, number)
        self._columns_ids = request_ids

    def _mark_folded(self, request_id: bytes) -> None:
        if self._unfolded.pop(request_id, None) is not None:
            self._columns_ids = ()

    def _due(self, record_count: int) -> list[bytes]:
        """The requests whose turn it is: the longest unfolded ones, a share that takes every one once per cycle."""
        count = -(-len(self._unfolded) * record_count // FOLD_CYCLE)
        due = zip(range(count), self._unfolded.items(), strict=False)
        return [request_id for _, (request_id, first_missing) in due if first_missing <= self.state.last]


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
