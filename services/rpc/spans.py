"""Spans of OpenTelemetry: made here, sent to a collector over OTLP by the library's own thread. Imported only where a process traces.

Between processes a span travels as the `traceparent` of W3C Trace Context, and only if it is sampled: what is not traced at the
gateway costs nothing behind it. No attribute of any span has text of a prompt or an answer.
"""

import asyncio
import os
import threading
from collections.abc import Mapping

import structlog
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import Span, SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

_log = structlog.get_logger()

EXPORT_DELAY_MS = 1000
"""A span waits so long at most for others to be sent with; a process that is killed takes those of this time along."""

EXPORT_S_MAX = 5.0
"""How long a collector may take for one request."""

STOP_S_MAX = 2.0
"""How long the end of a process waits for the last spans to be sent."""

_PROPAGATOR = TraceContextTextMapPropagator()


class Tracing:
    """One for a process; threads may share it."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("tessera")

    @classmethod
    def to_collector(cls, role: str, endpoint: str, sample_ratio: float) -> "Tracing":
        """Send to the collector at `endpoint`. Of the spans without a parent `sample_ratio` are sampled, of the others those whose parent is.
        What the collector is to be told of this process beside its role can be said by OTEL_RESOURCE_ATTRIBUTES."""
        own = {
            "service.name": f"tessera-{role}",
            "service.namespace": "tessera",
            "service.instance.id": f"{role}-{os.getpid()}",
        }
        provider = TracerProvider(
            sampler=ParentBasedTraceIdRatio(sample_ratio), resource=Resource.create(own), shutdown_on_exit=False
        )
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_S_MAX)
        provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=EXPORT_DELAY_MS))
        _log.info("tracing", endpoint=endpoint)
        return cls(provider)

    def begin(
        self,
        name: str,
        parent: str | Mapping[str, str],
        attributes: Mapping[str, AttributeValue] | None = None,
        *,
        began_ns: int | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Span:
        """A span under `parent`, a `traceparent` or the metadata that may have one. `began_ns` is Unix time; None is now. The caller ends it."""
        carrier = {"traceparent": parent} if isinstance(parent, str) else parent
        context = _PROPAGATOR.extract(carrier)
        return self._tracer.start_span(name, context, kind, attributes, start_time=began_ns)

    async def stop(self) -> None:
        """Send what has ended, for STOP_S_MAX at most; nothing is sent from then on."""
        sending = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        sending.start()
        await asyncio.to_thread(sending.join, STOP_S_MAX)
        if sending.is_alive():
            _log.warning("the last spans were not sent", waited_s=STOP_S_MAX)


def trace_context_of(span: Span) -> str:
    """How `span` is named to another process, a `traceparent`; empty where it is not sampled."""
    context = span.get_span_context()
    if not context.trace_flags.sampled:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
