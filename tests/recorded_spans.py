"""Spans of this process, kept instead of sent."""

from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

from services.rpc.spans import Tracing

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE_ID}-{PARENT_ID}-01"
UNSAMPLED = f"00-{TRACE_ID}-{PARENT_ID}-00"


class RecordedSpans:
    """`tracing` for what is tested; `ended` in the order in which they ended."""

    def __init__(self, sample_ratio: float = 1.0) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(sampler=ParentBasedTraceIdRatio(sample_ratio), shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracing = Tracing(provider)

    @property
    def ended(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.ended]

    def one(self, name: str) -> ReadableSpan:
        (found,) = [span for span in self.ended if span.name == name]
        return found


def events(span: ReadableSpan) -> list[str]:
    return [event.name for event in span.events]


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def parent_of(span: ReadableSpan) -> str:
    """Its span id, hex; empty where there is none."""
    return f"{span.parent.span_id:016x}" if span.parent is not None else ""


def trace_of(span: ReadableSpan) -> str:
    return f"{span.context.trace_id:032x}"


def id_of(span: ReadableSpan) -> str:
    return f"{span.context.span_id:016x}"
