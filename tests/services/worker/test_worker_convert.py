"""Every pair of `services.worker.convert` gives back what went in, over the wire; what no peer sends is refused by field name."""

from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker import convert
from services.worker.convert import MalformedMessage
from tessera.values.batch import RowError, ScheduledBatch, ScheduledBatchOutput, SlotDrop, SlotEntry, SlotSwap
from tessera.values.finish import Finish, FinishReason
from tessera.values.identity import NO_EPOCH, Epoch
from tessera.values.logprobs import Logprobs, PromptLogprobs
from tessera.values.model import KVGeometry, ModelInfo, WorkerDescription, WorkerLimits
from tessera.values.report import DroppedSlot, SlotReport, WorkerReport
from tessera.values.sampling import SEED_MAX, SamplingParams
from tessera.worker.v1 import types_pb2, worker_pb2

U32 = st.integers(0, 2**32 - 1)
I31 = st.integers(0, 2**31 - 1)
STEPS = st.integers(1, 2**63 - 1)
IDS = st.binary(min_size=16, max_size=16)
COUNT = st.integers(1, 2**32 - 1)
FINITE = st.floats(allow_nan=False, allow_infinity=False)

ONE_ENTRY = Logprobs(*(np.array(values, dtype) for values, dtype in (([1], "i4"), ([7], "i4"), ([-0.5], "f4"), ([1], "i4"))))

epochs = st.builds(Epoch, st.integers(1, 2**64 - 1), IDS) | st.just(NO_EPOCH)
samplings = st.builds(
    SamplingParams,
    seed=st.integers(0, SEED_MAX),
    temperature=FINITE,
    top_p=FINITE,
    top_k=st.integers(-1, 2**31 - 1),
    min_p=FINITE,
    max_tokens=U32,
    min_tokens=U32,
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(U32, max_size=4).map(tuple),
    stop_token_sequences=st.lists(st.lists(U32, max_size=3).map(tuple), max_size=3).map(tuple),
    presence_penalty=FINITE,
    frequency_penalty=FINITE,
    repetition_penalty=FINITE.filter(bool),
    logit_bias=st.lists(st.tuples(U32, FINITE), max_size=3).map(tuple),
    allowed_token_ids=st.lists(U32, max_size=4).map(tuple),
    bad_words_ids=st.lists(st.lists(U32, max_size=3).map(tuple), max_size=3).map(tuple),
    logprobs=st.none() | U32,
    prompt_logprobs=st.none() | U32,
    logprob_token_ids=st.lists(U32, max_size=4).map(tuple),
)
finishes = st.builds(
    Finish,
    st.sampled_from(FinishReason),
    U32,
    st.none() | U32,
    st.none() | st.text(max_size=8),
    st.text(max_size=8),
)
models = st.builds(
    ModelInfo,
    name=st.text(max_size=8),
    architecture=st.text(max_size=8),
    vocab_size=U32,
    max_model_len=U32,
    eos_token_ids=st.lists(U32, max_size=3).map(tuple),
    bos_token_id=st.none() | U32,
    tokenizer_digest=st.text(max_size=8),
    weights_digest=st.text(max_size=8),
)


def descriptions(num_blocks: st.SearchStrategy[int] = COUNT) -> st.SearchStrategy[WorkerDescription]:
    geometry = st.builds(KVGeometry, num_blocks, COUNT, st.integers(0, 2**64 - 1), st.text(max_size=8), U32)
    return st.builds(WorkerDescription, IDS, models, geometry, st.builds(WorkerLimits, COUNT, COUNT, COUNT, U32))


def column(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


columns = st.lists(I31, max_size=6).map(column)
entries = st.builds(SlotEntry, U32, IDS, U32, U32, columns, columns, U32, samplings, st.text(), st.text())
drops = st.builds(SlotDrop, U32, IDS, U32, st.none() | finishes)
pairs = st.lists(I31, max_size=6).map(lambda values: column(values[: len(values) // 2 * 2]).reshape(-1, 2))
swaps = st.builds(SlotSwap, U32, IDS, U32, columns, pairs)


@st.composite
def batches(draw: st.DrawFn) -> ScheduledBatch:
    rows = draw(st.integers(0, 5))
    row_column = st.lists(I31, min_size=rows, max_size=rows).map(column)
    counts = draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    return ScheduledBatch(
        epoch=draw(epochs),
        nonce=draw(st.integers(0, 2**64 - 1)),
        step_id=draw(STEPS),
        durable_step=draw(STEPS | st.just(0)),
        entries=tuple(draw(st.lists(entries, max_size=3))),
        drops=tuple(draw(st.lists(drops, max_size=3))),
        slots=draw(row_column),
        num_scheduled_tokens=draw(row_column),
        context_lens=draw(row_column),
        new_block_counts=column(counts),
        new_block_ids=column(draw(st.lists(I31, min_size=sum(counts), max_size=sum(counts)))),
        num_decodes=draw(st.integers(0, rows)),
        swap_outs=tuple(draw(st.lists(swaps, max_size=2))),
        swap_ins=tuple(draw(st.lists(swaps, max_size=2))),
        copies=draw(pairs),
        zero_blocks=draw(columns),
        is_dummy_run=draw(st.booleans()),
        seen_step=draw(STEPS | st.just(0)),
    )


@st.composite
def outputs(draw: st.DrawFn) -> ScheduledBatchOutput:
    counts = draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))
    errors = st.builds(RowError, st.integers(0, len(counts) - 1), st.text(max_size=8))
    return ScheduledBatchOutput(
        epoch=draw(epochs),
        nonce=draw(st.integers(0, 2**64 - 1)),
        step_id=draw(STEPS),
        token_counts=column(counts),
        token_ids=column(draw(st.lists(I31, min_size=sum(counts), max_size=sum(counts)))),
        row_errors=tuple(draw(st.lists(errors, max_size=2))),
        compute_us=draw(st.integers(0, 2**64 - 1)),
        draft_counts=column(draw(st.just([]) | st.lists(I31, min_size=len(counts), max_size=len(counts)))),
        logprobs=draw(st.none() | logprobs_of(sum(counts))),
        prompt_logprobs=draw(st.none() | prompt_logprobs_of(len(counts))),
    )


@st.composite
def logprobs_of(draw: st.DrawFn, num_tokens: int) -> Logprobs:
    counts = draw(st.lists(st.integers(0, 3), min_size=num_tokens, max_size=num_tokens))
    ids = draw(st.lists(I31, min_size=sum(counts), max_size=sum(counts)))
    values = draw(st.lists(st.floats(max_value=0.0, width=32), min_size=len(ids), max_size=len(ids)))
    return Logprobs(column(counts), column(ids), np.array(values, np.float32), column([int(count > 0) for count in counts]))


@st.composite
def prompt_logprobs_of(draw: st.DrawFn, num_rows: int) -> PromptLogprobs:
    row_counts = draw(st.lists(st.integers(0, 3), min_size=num_rows, max_size=num_rows))
    return PromptLogprobs(column(row_counts), draw(logprobs_of(sum(row_counts))))


@st.composite
def slot_reports(draw: st.DrawFn) -> SlotReport:
    token_ids = draw(columns)
    length = st.integers(0, len(token_ids))
    table, is_swapped, salt = draw(columns), draw(st.booleans()), draw(st.text())
    return SlotReport(draw(U32), draw(IDS), draw(U32), draw(length), token_ids, table, draw(length), is_swapped, salt)


@st.composite
def dropped_slots(draw: st.DrawFn) -> DroppedSlot:
    slot = draw(slot_reports())
    kept = {
        name: getattr(slot, name)
        for name in ("request_id", "attempt", "prompt_len", "token_ids", "block_table", "computed_len", "cache_salt")
    }
    return DroppedSlot(**kept, finish=draw(st.none() | finishes), drop_step=draw(STEPS))


@st.composite
def reports(draw: st.DrawFn) -> WorkerReport:
    num_blocks = draw(st.integers(1, 6))
    return WorkerReport(
        nonce=draw(st.integers(0, 2**64 - 1)),
        description=draw(descriptions(st.just(num_blocks))),
        last_step=draw(STEPS | st.just(0)),
        slots=tuple(draw(st.lists(slot_reports(), max_size=3))),
        dropped=tuple(draw(st.lists(dropped_slots(), max_size=3))),
        last_write_step=np.array(draw(st.lists(STEPS, min_size=num_blocks, max_size=num_blocks)), dtype=np.int64),
    )


def assert_same(got: Any, expected: Any) -> None:
    """Equality that looks into arrays."""
    assert type(got) is type(expected)
    if isinstance(expected, np.ndarray):
        assert got.dtype == expected.dtype and got.tolist() == expected.tolist()
    elif is_dataclass(expected):
        for item in fields(expected):
            assert_same(getattr(got, item.name), getattr(expected, item.name))
    elif isinstance(expected, tuple):
        assert len(got) == len(expected)
        for left, right in zip(got, expected, strict=True):
            assert_same(left, right)
    else:
        assert got == expected


def wired(message: Any) -> Any:
    """The message as the other process reads it."""
    return type(message).FromString(message.SerializeToString())


PAIRS = {
    "epoch": epochs,
    "sampling": samplings,
    "finish": finishes,
    "model_info": models,
    "description": descriptions(),
    "batch": batches(),
    "output": outputs(),
    "slot_report": slot_reports(),
    "dropped_slot": dropped_slots(),
}


@pytest.mark.parametrize("name", PAIRS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_value_survives_the_wire(name: str, data: st.DataObject) -> None:
    value = data.draw(PAIRS[name])
    message = wired(getattr(convert, f"{name}_to_proto")(value))
    assert_same(getattr(convert, f"{name}_from_proto")(message), value)


@settings(max_examples=60, deadline=None)
@given(report=reports())
def test_a_report_survives_the_wire_in_pieces(report: WorkerReport) -> None:
    pieces = [wired(piece) for piece in convert.report_to_proto(report)]
    assert len(pieces) == 2 + len(report.slots) + len(report.dropped)
    assert_same(convert.report_from_proto(pieces), report)


def test_columns_read_from_a_message_are_not_copies() -> None:
    data = column([1, -2, 3]).tobytes()
    read = convert.column_from_bytes(data, "field")
    assert read.tolist() == [1, -2, 3]
    assert read.base is not None and not read.flags.writeable


PARAMS = SamplingParams(seed=1)
BATCH = ScheduledBatch(
    epoch=Epoch(1, b"i" * 16),
    nonce=1,
    step_id=1,
    durable_step=0,
    entries=(SlotEntry(0, b"r" * 16, 1, 2, column([5, 6]), column([0]), 0, PARAMS),),
    drops=(SlotDrop(1, b"q" * 16, 1, Finish(FinishReason.EOS, 1)),),
    slots=column([0]),
    num_scheduled_tokens=column([2]),
    context_lens=column([2]),
    new_block_counts=column([1]),
    new_block_ids=column([3]),
    num_decodes=0,
)
SWAP = SlotSwap(2, b"s" * 16, 1, column([4]), column([1, 4]).reshape(1, 2))


def test_a_batch_that_moves_nothing_says_nothing_of_it_on_the_wire() -> None:
    fields_set = {item.name for item, _ in convert.batch_to_proto(BATCH).ListFields()}
    assert not fields_set & {"swap_outs", "swap_ins", "copies", "zero_blocks", "is_dummy_run", "seen_step"}
    read = convert.batch_from_proto(wired(convert.batch_to_proto(BATCH)))
    assert read.copies.shape == (0, 2) and not read.moves_blocks


@pytest.mark.parametrize("field", ["swap_outs", "swap_ins"])
@pytest.mark.parametrize(
    ("change", "named"),
    [({"request_id": b""}, "request_id"), ({"block_table": b"123"}, "swap.block_table"), ({"pairs": b"1234"}, "swap.pairs")],
)
def test_a_malformed_swap_is_refused_by_field(field: str, change: dict[str, Any], named: str) -> None:
    message = convert.batch_to_proto(replace(BATCH, **{field: (SWAP,)}))
    assert_same(getattr(convert.batch_from_proto(wired(message)), field), (SWAP,))
    for name, value in change.items():
        setattr(getattr(message, field)[0], name, value)
    with pytest.raises(MalformedMessage, match=named):
        convert.batch_from_proto(message)


def broken_batch(**changes: Any) -> worker_pb2.ScheduledBatch:
    message = convert.batch_to_proto(BATCH)
    for path, value in changes.items():
        target: Any = message
        *parents, field = path.split("__")
        for parent in parents:
            target = getattr(target, parent)
            target = target[0] if parent in ("entries", "drops") else target
        setattr(target, field, value)
    return message


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"slots": b"123"}, "slots"),
        ({"context_lens": column([1, 2]).tobytes()}, "context_lens"),
        ({"num_scheduled_tokens": b""}, "num_scheduled_tokens"),
        ({"new_block_counts": column([-1]).tobytes()}, "new_block_counts"),
        ({"new_block_ids": column([1, 2]).tobytes()}, "new_block_ids"),
        ({"num_decodes": 2}, "num_decodes"),
        ({"copies": column([1, 2, 3]).tobytes()}, "copies"),
        ({"zero_blocks": b"12345"}, "zero_blocks"),
        ({"step_id": 0}, "step_id"),
        ({"step_id": 2**63}, "step_id"),
        ({"durable_step": 2**64 - 1}, "durable_step"),
        ({"seen_step": 2**63}, "seen_step"),
        ({"epoch__instance": b"short"}, "epoch"),
        ({"epoch__number": 0}, "epoch"),
        ({"entries__request_id": b""}, "request_id"),
        ({"entries__token_ids": b"1"}, "entry.token_ids"),
        ({"entries__sampling__seed": 2**63}, "sampling.seed"),
        ({"drops__request_id": b"x" * 17}, "request_id"),
        ({"drops__finish__reason": 0}, "finish.reason"),
        ({"drops__finish__reason": 99}, "finish.reason"),
    ],
)
def test_a_malformed_batch_is_refused_by_field(changes: dict[str, Any], field: str) -> None:
    assert_same(convert.batch_from_proto(broken_batch()), BATCH)
    with pytest.raises(MalformedMessage, match=field):
        convert.batch_from_proto(broken_batch(**changes))


def test_counts_that_overflow_int32_are_refused() -> None:
    counts = column([2**31 - 1, 2**31 - 1, 2])  # add up to 0 in int32
    message = broken_batch(
        **{name: column([0, 0, 0]).tobytes() for name in ("slots", "num_scheduled_tokens", "context_lens")},
        new_block_counts=counts.tobytes(),
        new_block_ids=b"",
    )
    with pytest.raises(MalformedMessage, match="new_block_ids"):
        convert.batch_from_proto(message)


def test_a_malformed_output_is_refused() -> None:
    output = ScheduledBatchOutput(Epoch(1, b"i" * 16), 1, 1, column([1]), column([7]), (RowError(0, "bad"),))
    for change, field in [
        ({"token_ids": column([])}, "token_ids"),
        ({"token_counts": column([-1])}, "token_counts"),
        ({"row_errors": (RowError(1, "bad"),)}, "row_errors"),
        ({"draft_counts": column([1, 1])}, "draft_counts"),
        ({"logprobs": replace(ONE_ENTRY, counts=column([1, 0]))}, "logprobs.counts"),
        ({"logprobs": replace(ONE_ENTRY, ranks=column([]))}, "logprobs.ranks"),
        ({"logprobs": replace(ONE_ENTRY, token_ids=column([7, 8]))}, "logprobs.token_ids"),
        ({"logprobs": replace(ONE_ENTRY, logprobs=np.zeros(0, np.float32))}, "logprobs.logprobs"),
        ({"prompt_logprobs": PromptLogprobs(column([1, 0]), ONE_ENTRY)}, "prompt_logprobs.row_counts"),
        ({"prompt_logprobs": PromptLogprobs(column([-1]), ONE_ENTRY)}, "prompt_logprobs.row_counts"),
        ({"prompt_logprobs": PromptLogprobs(column([2]), ONE_ENTRY)}, "prompt_logprobs.tokens.counts"),
    ]:
        with pytest.raises(MalformedMessage, match=field):
            convert.output_from_proto(convert.output_to_proto(replace(output, **change)))


def small_report() -> list[worker_pb2.AttachResponse]:
    description = WorkerDescription(
        b"b" * 16, ModelInfo("m", "a", 8, 8, (), None, "", ""), KVGeometry(2, 4, 8, "f"), WorkerLimits(1, 8)
    )
    slot = SlotReport(0, b"r" * 16, 1, 1, column([1, 2]), column([0]), 1)
    dropped = DroppedSlot(b"q" * 16, 1, 1, column([1]), column([1]), 1, None, 3)
    return list(convert.report_to_proto(WorkerReport(4, description, 5, (slot,), (dropped,), np.array([5, 1]))))


def test_a_report_with_pieces_missing_or_mixed_is_refused() -> None:
    header, slot, dropped, end = small_report()
    assert convert.report_from_proto([header, slot, dropped, end]).last_step == 5
    for pieces in ([], [header], [header, end], [header, dropped, slot, end], [slot, dropped, end], [header, slot, dropped]):
        with pytest.raises(MalformedMessage, match="report"):
            convert.report_from_proto(pieces)
    slot.nonce = 3
    with pytest.raises(MalformedMessage, match="two nonces"):
        convert.report_from_proto([header, slot, dropped, end])


def test_a_report_that_contradicts_itself_is_refused() -> None:
    pieces = small_report()
    pieces[1].slot.computed_len = 3
    with pytest.raises(MalformedMessage, match="computed_len"):
        convert.report_from_proto(pieces)
    pieces = small_report()
    pieces[0].header.last_write_step = b"\0" * 8
    with pytest.raises(MalformedMessage, match="last_write_step"):
        convert.report_from_proto(pieces)


def test_every_finish_reason_has_a_number_of_its_own() -> None:
    numbers = {convert.finish_to_proto(Finish(reason, 1)).reason for reason in FinishReason}
    assert numbers == set(types_pb2.FinishReason.values()) - {types_pb2.FINISH_REASON_UNSPECIFIED}
