"""What the journal has to learn from a scheduler; the journal gives the record its number."""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np

from services.scheduler.core.record import BlockDelta, DecodeColumns, RequestDelta
from services.scheduler.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Changes:
    """Everything that changed since the last time, absolute; the fields of a `Record` but its number.

    A block that a batch in flight appended to a table is told with the output of that batch.
    """

    requests: tuple[RequestDelta, ...] = ()
    blocks: tuple[BlockDelta, ...] = ()
    forgotten: tuple[bytes, ...] = ()
    decoded: DecodeColumns | None = None
    removed_workers: tuple[str, ...] = ()  # gone for good, not only away


def is_steady(sequence: Sequence) -> bool:
    """Whether what the journal does not know yet is one output token and at most one block; else it needs a delta."""
    cursor = sequence.cursor
    return (
        sequence.output_len == cursor.output_len + 1
        and cursor.num_blocks <= len(sequence.table.block_ids) <= cursor.num_blocks + 1
    )


def decode_columns(sequences: Items[Sequence], ids_before: tuple[bytes, ...] = ()) -> DecodeColumns:
    """One row for each of `sequences`, all steady; moves their cursors. Where these are the requests of the columns before, their ids are
    the same object: the journal keeps the columns of many steps, and compares them."""
    token_ids, token_offsets, grown = [], [], []
    for row, sequence in enumerate(sequences):
        cursor, block_ids = sequence.cursor, sequence.table.block_ids
        token_offsets.append(cursor.output_len)
        token_ids.append(sequence.ledger.token_ids.output[-1])
        cursor.output_len += 1
        if len(block_ids) > cursor.num_blocks:
            grown.append((row, cursor.num_blocks, block_ids[-1]))
            cursor.num_blocks += 1
    grown_columns = np.array(grown, np.int32).reshape(-1, 3)
    request_ids = tuple(sequence.request_id for sequence in sequences)
    return DecodeColumns(
        request_ids=ids_before if request_ids == ids_before else request_ids,
        token_offsets=np.array(token_offsets, np.int32),
        token_ids=np.array(token_ids, np.int32),
        grown_rows=grown_columns[:, 0],
        table_offsets=grown_columns[:, 1],
        block_ids=grown_columns[:, 2],
    )


def request_delta(sequence: Sequence) -> RequestDelta:
    """All that the journal does not know of a sequence yet; moves its cursor."""
    cursor = sequence.cursor
    is_first, cursor.is_known = not cursor.is_known, True
    token_offset = min(cursor.output_len, sequence.output_len)
    table_offset = min(cursor.num_blocks, len(sequence.table.block_ids))
    cursor.output_len, cursor.num_blocks = sequence.output_len, len(sequence.table.block_ids)
    return RequestDelta(
        request_id=sequence.request_id,
        status=sequence.status,
        subscriber=sequence.subscriber,
        attempt=sequence.attempt,
        worker=sequence.worker,
        token_offset=token_offset,
        token_ids=sequence.output_token_ids(token_offset),
        table_offset=table_offset,
        block_ids=tuple(sequence.table.block_ids[table_offset:]),
        num_cached_tokens=sequence.num_cached_tokens,
        finish=sequence.finish,
        timings=sequence.timings,
        submission=sequence.submission if is_first else None,
        arrival=sequence.arrival if is_first else None,
    )
