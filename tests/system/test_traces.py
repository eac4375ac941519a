"""One trace from the client's own span through gateway, scheduler and worker, at a collector; and through the death of the scheduler."""

from pathlib import Path

import pytest
from collector import Collector
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from process_stack import MODEL, Stack, StackOptions
from stream_reader import wait_until

from tessera.client import Client

GATEWAY, SCHEDULER, WORKER = "tessera-gateway", "tessera-scheduler", "tessera-worker"
CALL = "tessera.v1.InferenceService/StreamGenerate"
PROMPT, TOKENS = "An unmistakable question", 7000


@pytest.mark.slow
def test_one_trace_goes_through_all_processes_and_a_takeover(tmp_path: Path) -> None:
    with Collector() as collector:
        options = ["--otlp-endpoint", collector.endpoint]
        roles = StackOptions(
            model=MODEL,
            worker_model=f"deterministic:{MODEL}",
            scheduler=[*options, "--lease-ms", "1000"],
            worker=[*options, "--kv-cache-bytes", str(4 << 20)],
            gateway=[*options, "--trace-sample-ratio", "0"],
        )
        with Stack(tmp_path, roles) as stack, Client(stack.address) as client:
            client.generate(PROMPT, max_tokens=2)  # nobody asked for a trace of this
            with TracerProvider().get_tracer("test").start_as_current_span("caller") as caller:
                pieces = client.stream(PROMPT, max_tokens=TOKENS, ignore_eos=True, seed=1)
                next(pieces)
                wait_until(lambda: bool(collector.named(SCHEDULER, "prefill")), "the first phases are told")
                stack.scheduler.kill()
                stack.scheduler.start()
                *_, last = pieces
            assert last.finish is not None and last.token_offset + len(last.token_ids) == TOKENS
            for role in (stack.gateway, stack.scheduler, stack.worker):
                assert role.stop() == 0
        _check(collector, caller.get_span_context())


def _check(collector: Collector, caller: trace.SpanContext) -> None:
    assert {span.message.trace_id for span in collector.spans} == {caller.trace_id.to_bytes(16, "big")}
    (call,) = collector.named(GATEWAY, CALL)
    assert call.message.parent_span_id == caller.span_id.to_bytes(8, "big")
    others = [span for span in collector.spans if span is not call and span.message.span_id != call.message.span_id]
    assert {span.message.parent_span_id for span in others} == {call.message.span_id}
    assert sorted((span.service, span.name) for span in others) == [
        (GATEWAY, "tokenize"),
        (SCHEDULER, "decode"),
        (SCHEDULER, "prefill"),
        (SCHEDULER, "queue"),
        (WORKER, "worker decode"),
        (WORKER, "worker prefill"),
    ], "the decode of the killed scheduler was never told, that of the next one was"
    (decode,), (queue,) = collector.named(SCHEDULER, "decode"), collector.named(SCHEDULER, "queue")
    assert decode.events == ["takeover"] and decode["tessera.epoch"] > queue["tessera.epoch"]
    (computed,) = collector.named(WORKER, "worker decode")
    assert computed["gen_ai.usage.output_tokens"] == TOKENS - 1, "the first one ended the prefill"
    assert computed["tessera.slot_end"] == "max_tokens"
    assert call["gen_ai.usage.output_tokens"] == decode["gen_ai.usage.output_tokens"] == TOKENS
    assert {span["tessera.request_id"] for span in collector.spans if span.name != "tokenize"} == {call["tessera.request_id"]}
    assert not any(PROMPT.encode() in span.message.SerializeToString() for span in collector.spans)
