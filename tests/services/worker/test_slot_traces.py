"""What a worker does for traced requests, as spans: from the entry into a slot to its drop."""

from typing import Any

import numpy as np
import pytest

from model_worker.batch_refused import BatchRefused
from services.worker.slot_traces import SlotTraces
from tessera.values.batch import ScheduledBatch, ScheduledBatchOutput, SlotDrop, SlotEntry
from tessera.values.finish import Finish, FinishReason
from tessera.values.identity import Epoch
from tessera.values.sampling import SamplingParams
from tests.recorded_spans import PARENT_ID, SAMPLED, TRACE_ID, RecordedSpans, attributes, parent_of, trace_of

EPOCH = Epoch(1, b"e" * 16)
STEP_US = 1000
DONE = Finish(FinishReason.MAX_TOKENS, 3)


class Bench:
    """Executes batches whose rows are given as slot -> (positions, tokens sampled), decodes first."""

    def __init__(self) -> None:
        self.spans = RecordedSpans()
        self.now_ns = 0
        self.traces = SlotTraces(self.spans.tracing, 8, "worker:1", lambda: self.now_ns)
        self.steps = 0

    def step(
        self,
        rows: dict[int, tuple[int, int]],
        *,
        entries: tuple[SlotEntry, ...] = (),
        drops: tuple[SlotDrop, ...] = (),
        num_decodes: int = 0,
        **fields: Any,
    ) -> None:
        self.steps += 1
        self.now_ns += 1000 * STEP_US
        batch = batch_of(self.steps, rows, entries, drops, num_decodes=num_decodes, **fields)
        counts = np.array([tokens for _, tokens in rows.values()], np.int32)
        output = ScheduledBatchOutput(EPOCH, 1, self.steps, counts, np.zeros(counts.sum(), np.int32), compute_us=STEP_US)
        self.traces.note(batch, output)


def batch_of(
    step: int, rows: dict[int, tuple[int, int]], entries: tuple[SlotEntry, ...], drops: tuple[SlotDrop, ...], **fields: Any
) -> ScheduledBatch:
    slots = np.array(list(rows), np.int32)
    counts = np.array([positions for positions, _ in rows.values()], np.int32)
    none = np.zeros(0, np.int32)
    return ScheduledBatch(EPOCH, 1, step, 0, entries, drops, slots, counts, counts, np.zeros_like(slots), none, **fields)


def entry(slot: int, context: str = SAMPLED, attempt: int = 1, cached: int = 0) -> SlotEntry:
    ids = np.arange(10, dtype=np.int32)
    return SlotEntry(slot, bytes([slot]) * 16, attempt, 10, ids, ids, cached, SamplingParams(1), "", context)


def drop(slot: int, finish: Finish | None = None, attempt: int = 1) -> SlotDrop:
    return SlotDrop(slot, bytes([slot]) * 16, attempt, finish)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_stay_is_a_prefill_and_a_decode(bench: Bench) -> None:
    bench.step({2: (4, 0)}, entries=(entry(2, cached=2),))
    bench.step({2: (4, 1)})
    bench.step({2: (1, 1)}, num_decodes=1)
    bench.step({2: (3, 2)}, num_decodes=1)
    assert bench.spans.names == ["worker prefill"]
    bench.step({}, drops=(drop(2, DONE),))
    prefill, decode = bench.spans.one("worker prefill"), bench.spans.one("worker decode")
    for span in (prefill, decode):
        assert (trace_of(span), parent_of(span)) == (TRACE_ID, PARENT_ID)
        assert attributes(span).items() >= {
            ("tessera.request_id", "02" * 16),
            ("tessera.worker", "worker:1"),
            ("tessera.slot", 2),
            ("tessera.attempt", 1),
            ("gen_ai.usage.input_tokens", 10),
        }
    step_ns = 1000 * STEP_US
    assert (prefill.start_time, prefill.end_time) == (0, 2 * step_ns), "the first step began before it was told of"
    assert (decode.start_time, decode.end_time) == (2 * step_ns, 4 * step_ns)
    said = attributes(prefill)
    assert (said["tessera.steps"], said["tessera.positions"], said["gen_ai.usage.output_tokens"]) == (2, 8, 1)
    assert said["gen_ai.usage.cache_read.input_tokens"] == 2
    said = attributes(decode)
    assert (said["tessera.steps"], said["tessera.positions"], said["gen_ai.usage.output_tokens"]) == (2, 4, 3)
    assert said["tessera.slot_end"] == "max_tokens"


def test_a_prompt_of_which_one_position_is_left_ends_among_the_decodes(bench: Bench) -> None:
    bench.step({1: (9, 0)}, entries=(entry(1),))
    bench.step({1: (1, 1)}, num_decodes=1)
    assert bench.spans.names == ["worker prefill"]


def test_what_is_not_traced_is_no_span_and_counts_for_nobody(bench: Bench) -> None:
    bench.step({0: (4, 1), 1: (4, 1)}, entries=(entry(0, context=""), entry(1)))
    for _ in range(3):
        bench.step({0: (1, 1)}, num_decodes=1)
    bench.step({}, drops=(drop(0, DONE), drop(1, DONE)))
    assert bench.spans.names == ["worker prefill", "worker decode"]
    assert attributes(bench.spans.one("worker decode"))["tessera.steps"] == 0


def test_a_slot_handed_on_in_one_batch_is_another_stay(bench: Bench) -> None:
    bench.step({3: (10, 1)}, entries=(entry(3),))
    bench.step({3: (10, 1)}, entries=(entry(3, attempt=2),), drops=(drop(3),))
    assert [attributes(span)["tessera.attempt"] for span in bench.spans.ended] == [1, 1, 2]
    assert attributes(bench.spans.one("worker decode"))["tessera.slot_end"] == "left"


def test_a_stale_drop_ends_nothing(bench: Bench) -> None:
    bench.step({3: (10, 1)}, entries=(entry(3, attempt=2),))
    bench.step({}, drops=(drop(3, attempt=1),))
    assert bench.spans.names == ["worker prefill"]


def test_an_entry_into_the_same_slot_ends_the_stay_before(bench: Bench) -> None:
    """A new leader lets a sequence enter again where its slot knows other ids."""
    bench.step({3: (10, 0)}, entries=(entry(3),))
    bench.step({3: (10, 1)}, entries=(entry(3, attempt=2),))
    assert attributes(bench.spans.ended[0])["tessera.slot_end"] == "entered again"
    assert attributes(bench.spans.ended[1])["tessera.steps"] == 1


def test_refused_and_dummy_batches_count_nothing(bench: Bench) -> None:
    bench.step({0: (4, 0)}, entries=(entry(0),))
    bench.traces.note(batch_of(9, {0: (4, 0)}, (), (drop(0),), num_decodes=0), BatchRefused(9, "no"))
    bench.step({0: (1, 0), 1: (1, 0)}, is_dummy_run=True)
    bench.traces.close()
    said = attributes(bench.spans.one("worker prefill"))
    assert (said["tessera.steps"], said["tessera.slot_end"]) == (1, "worker ended")
