"""What the journal has to learn from a scheduler; the journal gives the record its number."""

from dataclasses import dataclass

from services.scheduler.core.record import BlockDelta, RequestDelta
from services.scheduler.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class CoveredStep:
    """A worker step whose output is complete in these and earlier changes: durable with them."""

    worker: str
    boot_id: bytes
    step: int


@dataclass(frozen=True, slots=True)
class Changes:
    """Everything that changed since the last time, absolute; or the whole state, for a rewrite."""

    requests: tuple[RequestDelta, ...]
    blocks: tuple[BlockDelta, ...]
    forgotten: tuple[bytes, ...]
    covered: tuple[CoveredStep, ...]


def delta_since_cursor(sequence: Sequence) -> RequestDelta:
    """What the journal does not know of a sequence yet; moves its cursor."""
    cursor = sequence.cursor
    token_offset = min(cursor.output_len, sequence.output_len)
    table_offset = min(cursor.num_blocks, len(sequence.table.block_ids))
    delta = _delta(sequence, token_offset, table_offset, is_first=not cursor.is_known)
    cursor.is_known = True
    cursor.output_len = sequence.output_len
    cursor.num_blocks = len(sequence.table.block_ids)
    return delta


def whole_delta(sequence: Sequence) -> RequestDelta:
    """All of a sequence; the cursor stays, since absolute deltas may be applied on top."""
    return _delta(sequence, 0, 0, is_first=True)


def _delta(sequence: Sequence, token_offset: int, table_offset: int, is_first: bool) -> RequestDelta:
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
