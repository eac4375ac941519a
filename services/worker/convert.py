"""Protobuf <-> values for everything a worker says or hears; one `x_to_proto` / `x_from_proto` pair per message.

Callers import all of them from here; those of `types.proto` live in `convert_types`. Columns travel as little-endian
int32 (int64 where said) packed into bytes; arrays read from a message share its memory and are read-only. `*_from_proto`
checks shapes and domains that need no other state and raises MalformedMessage naming the field; whether a batch fits a
worker is the engine's to say.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from services.worker.columns import check_counts, column_from_bytes, column_to_bytes
from services.worker.convert_logprobs import (
    logprobs_from_proto,
    logprobs_to_proto,
    prompt_logprobs_from_proto,
    prompt_logprobs_to_proto,
)
from services.worker.convert_types import (
    MalformedMessage,
    description_from_proto,
    description_to_proto,
    epoch_from_proto,
    epoch_to_proto,
    finish_from_proto,
    finish_to_proto,
    geometry_from_proto,
    geometry_to_proto,
    limits_from_proto,
    limits_to_proto,
    model_info_from_proto,
    model_info_to_proto,
    sampling_from_proto,
    sampling_to_proto,
)
from tessera.values.batch import (
    NO_BLOCKS,
    NO_DRAFTS,
    NO_PAIRS,
    RowError,
    ScheduledBatch,
    ScheduledBatchOutput,
    SlotDrop,
    SlotEntry,
    SlotSwap,
)
from tessera.values.identity import REQUEST_ID_BYTES
from tessera.values.report import DroppedSlot, SlotReport, WorkerReport
from tessera.worker.v1 import worker_pb2

__all__ = [
    "MalformedMessage", "batch_from_proto", "batch_to_proto", "column_from_bytes", "column_to_bytes",
    "description_from_proto", "description_to_proto", "dropped_slot_from_proto", "dropped_slot_to_proto",
    "epoch_from_proto", "epoch_to_proto", "finish_from_proto", "finish_to_proto", "geometry_from_proto",
    "geometry_to_proto", "limits_from_proto", "limits_to_proto", "model_info_from_proto", "model_info_to_proto",
    "output_from_proto", "output_to_proto", "report_from_proto", "report_to_proto", "sampling_from_proto",
    "sampling_to_proto", "slot_report_from_proto", "slot_report_to_proto",
]  # fmt: skip

STEP_MAX = 2**63 - 1
"""Highest step id: steps are stored in int64 columns."""


def batch_to_proto(batch: ScheduledBatch) -> worker_pb2.ScheduledBatch:
    """Message of `batch`."""
    message = worker_pb2.ScheduledBatch(
        epoch=epoch_to_proto(batch.epoch),
        nonce=batch.nonce,
        step_id=batch.step_id,
        durable_step=batch.durable_step,
        entries=[_entry_to_proto(entry) for entry in batch.entries],
        drops=[_drop_to_proto(drop) for drop in batch.drops],
        slots=column_to_bytes(batch.slots),
        num_scheduled_tokens=column_to_bytes(batch.num_scheduled_tokens),
        context_lens=column_to_bytes(batch.context_lens),
        new_block_counts=column_to_bytes(batch.new_block_counts),
        new_block_ids=column_to_bytes(batch.new_block_ids),
        num_decodes=batch.num_decodes,
        is_dummy_run=batch.is_dummy_run,
        seen_step=batch.seen_step,
    )
    if batch.moves_blocks:
        message.swap_outs.extend(_swap_to_proto(swap) for swap in batch.swap_outs)
        message.swap_ins.extend(_swap_to_proto(swap) for swap in batch.swap_ins)
        message.copies = _pairs_to_bytes(batch.copies)
        message.zero_blocks = column_to_bytes(batch.zero_blocks)
    return message


def batch_from_proto(message: worker_pb2.ScheduledBatch) -> ScheduledBatch:
    """One step of work; its columns have one length, and the block counts add up to the block ids."""
    batch = ScheduledBatch(
        epoch=epoch_from_proto(message.epoch),
        nonce=message.nonce,
        step_id=_step(message.step_id, "step_id", minimum=1),
        durable_step=_step(message.durable_step, "durable_step"),
        entries=tuple(_entry_from_proto(entry) for entry in message.entries),
        drops=tuple(_drop_from_proto(drop) for drop in message.drops),
        slots=column_from_bytes(message.slots, "slots"),
        num_scheduled_tokens=column_from_bytes(message.num_scheduled_tokens, "num_scheduled_tokens"),
        context_lens=column_from_bytes(message.context_lens, "context_lens"),
        new_block_counts=column_from_bytes(message.new_block_counts, "new_block_counts"),
        new_block_ids=column_from_bytes(message.new_block_ids, "new_block_ids"),
        num_decodes=message.num_decodes,
        swap_outs=tuple(_swap_from_proto(swap) for swap in message.swap_outs),
        swap_ins=tuple(_swap_from_proto(swap) for swap in message.swap_ins),
        copies=_pairs_from_bytes(message.copies, "copies"),
        zero_blocks=column_from_bytes(message.zero_blocks, "zero_blocks") if message.zero_blocks else NO_BLOCKS,
        is_dummy_run=message.is_dummy_run,
        seen_step=_step(message.seen_step, "seen_step"),
    )
    rows = batch.num_rows
    for field in ("num_scheduled_tokens", "context_lens", "new_block_counts"):
        if len(getattr(batch, field)) != rows:
            raise MalformedMessage(f"{field}: {len(getattr(batch, field))} values for {rows} rows")
    check_counts(batch.new_block_counts, batch.new_block_ids, "new_block_counts", "new_block_ids")
    if batch.num_decodes > rows:
        raise MalformedMessage(f"num_decodes: {batch.num_decodes} of {rows} rows")
    return batch


def output_to_proto(output: ScheduledBatchOutput) -> worker_pb2.ScheduledBatchOutput:
    """Message of `output`."""
    return worker_pb2.ScheduledBatchOutput(
        epoch=epoch_to_proto(output.epoch),
        nonce=output.nonce,
        step_id=output.step_id,
        token_counts=column_to_bytes(output.token_counts),
        token_ids=column_to_bytes(output.token_ids),
        row_errors=[worker_pb2.RowError(row=error.row, message=error.message) for error in output.row_errors],
        compute_us=output.compute_us,
        draft_counts=column_to_bytes(output.draft_counts),
        logprobs=logprobs_to_proto(output.logprobs) if output.logprobs is not None else None,
        prompt_logprobs=prompt_logprobs_to_proto(output.prompt_logprobs) if output.prompt_logprobs is not None else None,
    )


def output_from_proto(message: worker_pb2.ScheduledBatchOutput) -> ScheduledBatchOutput:
    """What one batch sampled; the counts add up to the token ids, and every error names a row."""
    token_counts = column_from_bytes(message.token_counts, "token_counts")
    token_ids = column_from_bytes(message.token_ids, "token_ids")
    logprobs, prompt = message.logprobs, message.prompt_logprobs
    output = ScheduledBatchOutput(
        epoch=epoch_from_proto(message.epoch),
        nonce=message.nonce,
        step_id=_step(message.step_id, "step_id", minimum=1),
        token_counts=token_counts,
        token_ids=token_ids,
        row_errors=tuple(RowError(error.row, error.message) for error in message.row_errors),
        compute_us=message.compute_us,
        draft_counts=column_from_bytes(message.draft_counts, "draft_counts") if message.draft_counts else NO_DRAFTS,
        logprobs=logprobs_from_proto(logprobs, len(token_ids), "logprobs") if message.HasField("logprobs") else None,
        prompt_logprobs=prompt_logprobs_from_proto(prompt, len(token_counts)) if message.HasField("prompt_logprobs") else None,
    )
    check_counts(output.token_counts, output.token_ids, "token_counts", "token_ids")
    if len(output.draft_counts) not in (0, len(output.token_counts)):
        raise MalformedMessage(f"draft_counts: {len(output.draft_counts)} values for {len(output.token_counts)} rows")
    for error in output.row_errors:
        if error.row >= len(output.token_counts):
            raise MalformedMessage(f"row_errors: row {error.row} of {len(output.token_counts)}")
    return output


def report_to_proto(report: WorkerReport) -> Iterator[worker_pb2.AttachResponse]:
    """The report as the pieces of an Attach stream: one header, slots, dropped slots, one end."""
    nonce = report.nonce
    header = worker_pb2.ReportHeader(
        description=description_to_proto(report.description),
        last_step=report.last_step,
        last_write_step=report.last_write_step.astype("<i8", copy=False).tobytes(),
    )
    yield worker_pb2.AttachResponse(nonce=nonce, header=header)
    for slot in report.slots:
        yield worker_pb2.AttachResponse(nonce=nonce, slot=slot_report_to_proto(slot))
    for dropped in report.dropped:
        yield worker_pb2.AttachResponse(nonce=nonce, dropped=dropped_slot_to_proto(dropped))
    end = worker_pb2.ReportEnd(num_slots=len(report.slots), num_dropped=len(report.dropped))
    yield worker_pb2.AttachResponse(nonce=nonce, end=end)


def report_from_proto(parts: Iterable[worker_pb2.AttachResponse]) -> WorkerReport:
    """The report from all pieces of one Attach stream; pieces missing, out of order or of two nonces are malformed."""
    pieces = list(parts)
    kinds = [piece.WhichOneof("part") for piece in pieces]
    num_slots, num_dropped = kinds.count("slot"), kinds.count("dropped")
    if kinds != ["header", *["slot"] * num_slots, *["dropped"] * num_dropped, "end"]:
        raise MalformedMessage(f"report: pieces missing or out of order, {len(kinds)} came")
    header, end = pieces[0].header, pieces[-1].end
    if (end.num_slots, end.num_dropped) != (num_slots, num_dropped):
        raise MalformedMessage(
            f"report: {num_slots} slots and {num_dropped} dropped came, {end.num_slots} and {end.num_dropped} were sent"
        )
    if any(piece.nonce != pieces[0].nonce for piece in pieces):
        raise MalformedMessage("report: pieces of two nonces")
    description = description_from_proto(header.description)
    if len(header.last_write_step) != 8 * description.geometry.num_blocks:
        raise MalformedMessage(
            f"last_write_step: {len(header.last_write_step)} bytes for {description.geometry.num_blocks} blocks"
        )
    return WorkerReport(
        nonce=pieces[0].nonce,
        description=description,
        last_step=_step(header.last_step, "last_step"),
        slots=tuple(slot_report_from_proto(piece.slot) for piece in pieces[1 : 1 + num_slots]),
        dropped=tuple(dropped_slot_from_proto(piece.dropped) for piece in pieces[1 + num_slots : -1]),
        last_write_step=np.frombuffer(header.last_write_step, dtype="<i8"),
    )


def slot_report_to_proto(slot: SlotReport) -> worker_pb2.SlotReport:
    """Message of `slot`."""
    return worker_pb2.SlotReport(
        slot=slot.slot,
        request_id=slot.request_id,
        attempt=slot.attempt,
        prompt_len=slot.prompt_len,
        token_ids=column_to_bytes(slot.token_ids),
        block_table=column_to_bytes(slot.block_table),
        computed_len=slot.computed_len,
        is_swapped=slot.is_swapped,
        cache_salt=slot.cache_salt,
    )


def slot_report_from_proto(message: worker_pb2.SlotReport) -> SlotReport:
    """A live slot; neither prompt nor computed length exceeds its token ids."""
    token_ids = column_from_bytes(message.token_ids, "slot.token_ids")
    if max(message.prompt_len, message.computed_len) > len(token_ids):
        raise MalformedMessage(
            f"slot {message.slot}: {len(token_ids)} token ids, prompt_len {message.prompt_len}, computed_len {message.computed_len}"
        )
    return SlotReport(
        slot=message.slot,
        request_id=_request_id(message.request_id),
        attempt=message.attempt,
        prompt_len=message.prompt_len,
        token_ids=token_ids,
        block_table=column_from_bytes(message.block_table, "slot.block_table"),
        computed_len=message.computed_len,
        is_swapped=message.is_swapped,
        cache_salt=message.cache_salt,
    )


def dropped_slot_to_proto(dropped: DroppedSlot) -> worker_pb2.DroppedSlot:
    """Message of `dropped`; the number of the slot it once held is not kept."""
    slot = worker_pb2.SlotReport(
        request_id=dropped.request_id,
        attempt=dropped.attempt,
        prompt_len=dropped.prompt_len,
        token_ids=column_to_bytes(dropped.token_ids),
        block_table=column_to_bytes(dropped.block_table),
        computed_len=dropped.computed_len,
        cache_salt=dropped.cache_salt,
    )
    finish = None if dropped.finish is None else finish_to_proto(dropped.finish)
    return worker_pb2.DroppedSlot(slot=slot, finish=finish, drop_step=dropped.drop_step)


def dropped_slot_from_proto(message: worker_pb2.DroppedSlot) -> DroppedSlot:
    """A slot given up."""
    slot = slot_report_from_proto(message.slot)
    return DroppedSlot(
        request_id=slot.request_id,
        attempt=slot.attempt,
        prompt_len=slot.prompt_len,
        token_ids=slot.token_ids,
        block_table=slot.block_table,
        computed_len=slot.computed_len,
        finish=finish_from_proto(message.finish) if message.HasField("finish") else None,
        drop_step=_step(message.drop_step, "drop_step", minimum=1),
        cache_salt=slot.cache_salt,
    )


def _entry_to_proto(entry: SlotEntry) -> worker_pb2.SlotEntry:
    return worker_pb2.SlotEntry(
        slot=entry.slot,
        request_id=entry.request_id,
        attempt=entry.attempt,
        prompt_len=entry.prompt_len,
        token_ids=column_to_bytes(entry.token_ids),
        block_table=column_to_bytes(entry.block_table),
        num_cached_tokens=entry.num_cached_tokens,
        sampling=sampling_to_proto(entry.sampling),
        cache_salt=entry.cache_salt,
        trace_context=entry.trace_context,
    )


def _entry_from_proto(message: worker_pb2.SlotEntry) -> SlotEntry:
    return SlotEntry(
        slot=message.slot,
        request_id=_request_id(message.request_id),
        attempt=message.attempt,
        prompt_len=message.prompt_len,
        token_ids=column_from_bytes(message.token_ids, "entry.token_ids"),
        block_table=column_from_bytes(message.block_table, "entry.block_table"),
        num_cached_tokens=message.num_cached_tokens,
        sampling=sampling_from_proto(message.sampling),
        cache_salt=message.cache_salt,
        trace_context=message.trace_context,
    )


def _swap_to_proto(swap: SlotSwap) -> worker_pb2.SlotSwap:
    return worker_pb2.SlotSwap(
        slot=swap.slot,
        request_id=swap.request_id,
        attempt=swap.attempt,
        block_table=column_to_bytes(swap.block_table),
        pairs=_pairs_to_bytes(swap.pairs),
    )


def _swap_from_proto(message: worker_pb2.SlotSwap) -> SlotSwap:
    return SlotSwap(
        slot=message.slot,
        request_id=_request_id(message.request_id),
        attempt=message.attempt,
        block_table=column_from_bytes(message.block_table, "swap.block_table"),
        pairs=_pairs_from_bytes(message.pairs, "swap.pairs"),
    )


def _pairs_to_bytes(pairs: np.ndarray) -> bytes:
    assert pairs.ndim == 2 and pairs.shape[1] == 2, f"not pairs: {pairs.shape}"
    return column_to_bytes(pairs.ravel())


def _pairs_from_bytes(data: bytes, field: str) -> np.ndarray:
    if not data:
        return NO_PAIRS
    if len(data) % 8:
        raise MalformedMessage(f"{field}: {len(data)} bytes are not a whole number of int32 pairs")
    return column_from_bytes(data, field).reshape(-1, 2)


def _drop_to_proto(drop: SlotDrop) -> worker_pb2.SlotDrop:
    finish = None if drop.finish is None else finish_to_proto(drop.finish)
    return worker_pb2.SlotDrop(slot=drop.slot, request_id=drop.request_id, attempt=drop.attempt, finish=finish)


def _drop_from_proto(message: worker_pb2.SlotDrop) -> SlotDrop:
    finish = finish_from_proto(message.finish) if message.HasField("finish") else None
    return SlotDrop(message.slot, _request_id(message.request_id), message.attempt, finish)


def _request_id(request_id: bytes) -> bytes:
    if len(request_id) != REQUEST_ID_BYTES:
        raise MalformedMessage(f"request_id: {len(request_id)} bytes instead of {REQUEST_ID_BYTES}")
    return request_id


def _step(step: int, field: str, minimum: int = 0) -> int:
    if not minimum <= step <= STEP_MAX:
        raise MalformedMessage(f"{field}: {step} is not between {minimum} and {STEP_MAX}")
    return step
