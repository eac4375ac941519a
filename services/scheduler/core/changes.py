"""What the journal has to learn from a scheduler; the journal gives the record its number."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import numpy.typing as npt

from services.scheduler.core.lane_rows import LaneRows
from services.scheduler.core.record import BlockDelta, DecodeColumns, RequestDelta
from services.scheduler.core.row_index import rows_of
from services.scheduler.core.sequence import Sequence
from tessera.values.logprobs import Logprobs, joined_logprobs, no_logprobs


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
    ledger = sequence.ledger
    return (
        sequence.output_len == ledger.told_len + 1
        and ledger.told_blocks <= len(sequence.table.block_ids) <= ledger.told_blocks + 1
    )


def decode_columns(sequences: Items[Sequence]) -> DecodeColumns:
    """One row for each of `sequences`, all steady; the journal knows of it then."""
    token_ids, token_offsets, grown = [], [], []
    logprobs = _last_logprobs(sequences) if any(sequence.logprobs is not None for sequence in sequences) else None
    for row, sequence in enumerate(sequences):
        ledger, block_ids = sequence.ledger, sequence.table.block_ids
        token_offsets.append(ledger.told_len)
        token_ids.append(ledger.token_ids.output[-1])
        if len(block_ids) > ledger.told_blocks:
            grown.append((row, ledger.told_blocks, block_ids[-1]))
        ledger.tell(ledger.told_len + 1, len(block_ids))
    request_ids = tuple(sequence.request_id for sequence in sequences)
    columns = np.array(grown, np.int32).reshape(-1, 3).T
    offsets, ids = np.array(token_offsets, np.int32), np.array(token_ids, np.int32)
    return DecodeColumns(request_ids, offsets, ids, columns[0], columns[1], columns[2], logprobs)


def _last_logprobs(sequences: Items[Sequence]) -> Logprobs:
    """Those of the last output token of each."""
    none, found = no_logprobs(1), []
    for sequence in sequences:
        found.append(sequence.output_logprobs(sequence.output_len - 1, sequence.output_len) or none)
    return joined_logprobs(found)


@dataclass(frozen=True, slots=True, eq=False)
class LaneTokens:
    """What one output gave to sequences in lanes: a token each, `token_offsets` int32 `[R]` in their outputs, `token_ids` int32 `[R]`."""

    rows: LaneRows
    token_offsets: npt.NDArray[np.int32]
    token_ids: npt.NDArray[np.int32]

    def without(self, rows: set[int]) -> "LaneTokens":
        """All but some rows."""
        kept = [row for row in range(len(self.rows)) if row not in rows]
        return LaneTokens(self.rows.only(kept), self.token_offsets[kept], self.token_ids[kept])

    def rows_with_many_blocks(self) -> set[int]:
        """Those whose table changed by more than one block since the journal was told: not steady."""
        lanes, index = self.rows.lanes, self.rows.index
        unlike = lanes.covered[index] - lanes.told_covered[index] - lanes.block_size
        return set(rows_of((unlike > 0) | (unlike < -lanes.block_size)))

    def columns(self) -> DecodeColumns:
        """See `decode_columns`; all of these rows are in their lanes still."""
        rows, lanes = self.rows, self.rows.lanes
        lanes.told[rows.index] = self.token_offsets + rows.ones
        covered, told_covered = lanes.covered[rows.index], lanes.told_covered[rows.index]
        grown = (covered > told_covered).nonzero()[0]
        table_offsets = told_covered[grown] // lanes.block_size
        last_blocks = lanes.last_blocks[rows.index][grown]
        lanes.told_covered[rows.index] = covered
        return DecodeColumns(
            rows.request_ids, self.token_offsets, self.token_ids, grown.astype(np.int32), table_offsets, last_blocks
        )


def joined(columns: Items[DecodeColumns], ids_before: tuple[bytes, ...]) -> DecodeColumns | None:
    """Columns of different requests as one; None where there are no rows. Where their ids are `ids_before`, those of the columns before, they are
    the same object: the journal keeps the columns of many steps, and compares them."""
    columns = [item for item in columns if item.request_ids]
    if not columns:
        return None
    if len(columns) == 1:
        whole = columns[0]
    else:
        starts = np.cumsum([0] + [len(item.request_ids) for item in columns[:-1]])
        whole = DecodeColumns(
            tuple(chain.from_iterable(item.request_ids for item in columns)),
            np.concatenate([item.token_offsets for item in columns]),
            np.concatenate([item.token_ids for item in columns]),
            np.concatenate([item.grown_rows + start for item, start in zip(columns, starts, strict=True)]).astype(np.int32),
            np.concatenate([item.table_offsets for item in columns]),
            np.concatenate([item.block_ids for item in columns]),
            _joined_logprobs(columns),
        )
    if whole.request_ids is ids_before or whole.request_ids != ids_before:
        return whole
    return replace(whole, request_ids=ids_before)


def _joined_logprobs(columns: Items[DecodeColumns]) -> Logprobs | None:
    if all(item.logprobs is None for item in columns):
        return None
    return joined_logprobs([item.logprobs or no_logprobs(len(item.request_ids)) for item in columns])


def request_delta(sequence: Sequence) -> RequestDelta:
    """All that the journal does not know of a sequence yet; it does then."""
    ledger = sequence.ledger
    is_first, sequence.is_recorded = not sequence.is_recorded, True
    token_offset = min(ledger.told_len, sequence.output_len)
    table_offset = min(ledger.told_blocks, len(sequence.table.block_ids))
    ledger.tell(sequence.output_len, len(sequence.table.block_ids))
    prompt_logprobs = None if sequence.is_prompt_told else sequence.whole_prompt_logprobs()
    sequence.is_prompt_told |= prompt_logprobs is not None
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
        tokens_max=sequence.tokens_max,
        logprobs=sequence.output_logprobs(token_offset, sequence.output_len),
        prompt_logprobs=prompt_logprobs,
    )
