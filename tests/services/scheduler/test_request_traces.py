"""What a traced request waits for, as spans: of one leader, and of one after the other."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from core.fake_worker import FakeWorker
from leader_table import CONFIG, WORKER, Gateway, Table, submission

from services.scheduler.core.worker_loss import LossKind, WorkerLoss
from tessera.values.request import Submission
from tests.recorded_spans import PARENT_ID, SAMPLED, TRACE_ID, RecordedSpans, attributes, events, parent_of, trace_of


def traced(number: int = 1, max_tokens: int = 8) -> Submission:
    return replace(submission(number, [5, 6, 7], max_tokens, f"mine-{number}"), trace_context=SAMPLED)


class TickingTable(Table):
    """Whoever looks at the clock finds it later than before."""

    _now_us = 0

    @property
    def now_us(self) -> int:
        self._now_us += 1
        return self._now_us

    @now_us.setter
    def now_us(self, now_us: int) -> None:
        self._now_us = now_us


@pytest.fixture
def spans() -> RecordedSpans:
    return RecordedSpans()


def begin(table: Table, request: Submission, steps: int, wait_ms: int = 0) -> Gateway:
    """Submit `request`; of its steps each takes a millisecond, and before the first it waits."""
    gateway = table.gateway()
    gateway.submit(request)
    table.now_us += 1000 * wait_ms
    step(table, steps)
    return gateway


def step(table: Table, count: int) -> None:
    for _ in range(count):
        table.now_us += 1000
        table.run(1)


def test_a_request_is_a_span_for_each_phase(spans: RecordedSpans) -> None:
    table = Table(tracing=spans.tracing)
    request = traced()
    begin(table, request, 20)
    assert spans.names == ["queue", "prefill", "decode"]
    for span in spans.ended:
        assert (trace_of(span), parent_of(span)) == (TRACE_ID, PARENT_ID), "never under a span of a process that may be killed"
        assert attributes(span).items() >= {
            ("tessera.request_id", request.request_id.hex()),
            ("gen_ai.request.id", "mine-1"),
            ("gen_ai.usage.input_tokens", 3),
            ("tessera.epoch", 1),
        }
    queue, prefill, decode = spans.ended
    assert queue.start_time <= queue.end_time == prefill.start_time < prefill.end_time == decode.start_time < decode.end_time
    sequence = table.leader.scheduler.request(request.request_id)
    assert sequence is not None
    assert decode.end_time - queue.start_time == 1000 * sequence.timings.total_us
    assert decode.start_time - queue.start_time == 1000 * sequence.timings.ttft_us
    assert attributes(prefill)["tessera.worker"] == WORKER
    assert attributes(decode).items() >= {("gen_ai.usage.output_tokens", 8), ("tessera.finish_reason", "max_tokens")}
    assert not any(events(span) for span in spans.ended)


def test_one_that_is_not_traced_is_no_span(spans: RecordedSpans) -> None:
    table = Table(tracing=spans.tracing)
    begin(table, submission(2, [5, 6, 7]), 20)
    assert spans.names == []
    assert all(not entry.trace_context for batch in table.outbox for entry in batch.entries)


def test_the_worker_is_told_of_the_parent(spans: RecordedSpans) -> None:
    table = Table(tracing=spans.tracing)
    begin(table, traced(), 0)
    assert [entry.trace_context for batch in table.outbox for entry in batch.entries] == [SAMPLED]


def test_a_decode_step_costs_no_span_call(spans: RecordedSpans, monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(tracing=spans.tracing)
    begin(table, traced(max_tokens=20), 6)
    told = []
    traces = table.leader.traces
    assert traces is not None
    monkeypatch.setattr(traces, "note", lambda deltas: told.append(list(deltas)))
    step(table, 6)
    assert told and not any(told), "what only decodes is no delta"


def test_a_new_leader_goes_on_with_the_phase_under_way(spans: RecordedSpans) -> None:
    """The old one is killed: its last span is never sent."""
    lost = RecordedSpans()
    old = Table(tracing=lost.tracing)
    request = traced(max_tokens=20)
    begin(old, request, 6)
    assert lost.names == ["queue", "prefill"]
    new = Table(old.worker, old.store, term=2, tracing=spans.tracing)
    step(new, 30)
    assert spans.names == ["decode"], "it had its first token before"
    span = spans.one("decode")
    assert (trace_of(span), parent_of(span)) == (TRACE_ID, PARENT_ID)
    assert events(span)[0] == "takeover"
    said = dict(span.events[0].attributes or {})
    assert said == {"tessera.epoch": 2, "tessera.kv_kept": True, "tessera.worker": WORKER}
    assert attributes(span).items() >= {("gen_ai.usage.output_tokens", 20), ("tessera.epoch", 2), ("tessera.worker", WORKER)}


def test_what_ended_before_a_takeover_is_told_by_nobody_again(spans: RecordedSpans) -> None:
    old = Table()
    begin(old, traced(), 20)
    Table(old.worker, old.store, term=2, tracing=spans.tracing)
    assert spans.names == []


def test_what_runs_at_the_end_of_a_term_is_closed(spans: RecordedSpans) -> None:
    table = Table(tracing=spans.tracing)
    begin(table, traced(max_tokens=20), 6)
    assert table.leader.traces is not None
    table.leader.traces.close()
    assert spans.names == ["queue", "prefill", "decode"]
    assert events(spans.one("decode")) == ["term over"]


def test_the_loss_of_a_worker_is_an_event(spans: RecordedSpans) -> None:
    table = Table(tracing=spans.tracing)
    begin(table, traced(max_tokens=20), 6)
    loss = WorkerLoss(LossKind.BROKEN, text="Connection reset")
    assert table.leader.traces is not None
    with table.leader.traces.losing(WORKER, loss):
        table.leader.worker_detached(WORKER, loss)
    table.outbox.clear()
    table.worker.restart()
    report = table.worker.attach(table.leader.epoch, 2)
    table.leader.worker_attached(WORKER, report, table.outbox.append)
    step(table, 30)
    decode = spans.one("decode")
    assert events(decode) == ["worker lost", "resumed"]
    lost = dict(decode.events[0].attributes or {})
    assert lost == {"tessera.loss": "broken", "tessera.reason": "Connection reset", "tessera.worker": WORKER}
    assert attributes(decode)["gen_ai.usage.output_tokens"] == 20


@pytest.mark.parametrize(("mode", "kv", "again"), [("recompute", "dropped", ["resumed"]), ("swap", "swapped", [])])
def test_a_preemption_is_an_event(
    mode: str, kv: str, again: list[str], spans: RecordedSpans, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool too small for both: one makes room, and goes on; where its KV was swapped out, in its slot, with no attempt more."""
    monkeypatch.setattr("leader_table.CONFIG", replace(CONFIG, preemption_mode=mode))
    table = Table(FakeWorker(num_blocks=8, num_host_blocks=16), tracing=spans.tracing)
    for number in (1, 2):
        table.gateway().submit(traced(number, max_tokens=20))
    step(table, 100)
    preempted = [span for span in spans.ended if "preempted" in events(span)]
    assert preempted and spans.names.count("decode") == 2
    for span in preempted:
        assert events(span) == ["preempted", *again] * events(span).count("preempted")
        assert dict(span.events[0].attributes or {}) == {"tessera.kv": kv, "tessera.worker": WORKER}


@pytest.mark.parametrize(("steps", "phases"), [(0, ["queue", "prefill", "decode"]), (1, ["prefill", "decode"])])
def test_a_new_leader_goes_on_before_the_first_token(
    steps: int, phases: list[str], spans: RecordedSpans, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of several chunks, of which the worker has started none or one."""
    monkeypatch.setattr("leader_table.CONFIG", replace(CONFIG, long_prefill_token_threshold=8))
    old = TickingTable(tracing=RecordedSpans().tracing)
    request = replace(traced(), prompt_token_ids=np.arange(5, 35, dtype=np.int32))
    if not steps:
        old.leader.hand_over()  # it takes requests in, and sends nothing
    begin(old, request, steps, wait_ms=3)
    old.write()
    new = TickingTable(old.worker, old.store, term=2, tracing=spans.tracing)
    step(new, 40)
    assert spans.names == phases
    assert events(spans.ended[0])[0] == "takeover"
    for earlier, later in pairwise(spans.ended):
        assert earlier.end_time == later.start_time


def test_an_abort_ends_the_phase_under_way(spans: RecordedSpans) -> None:
    table = Table(tracing=spans.tracing)
    request = traced(max_tokens=20)
    begin(table, request, 6)
    table.leader.scheduler.abort(request.request_id, table.now_us)
    table.leader.tick()
    assert attributes(spans.one("decode"))["tessera.finish_reason"] == "aborted"
