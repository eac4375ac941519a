"""An OpenTelemetry collector for tests: takes spans over OTLP, as any other, and keeps them."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass(frozen=True)
class CollectedSpan:
    """A span as it came, with the `service` that sent it."""

    service: str
    message: trace_pb2.Span

    @property
    def name(self) -> str:
        return self.message.name

    @property
    def events(self) -> list[str]:
        return [event.name for event in self.message.events]

    def __getitem__(self, name: str) -> Any:
        """The value of an attribute."""
        (found,) = [item.value for item in self.message.attributes if item.key == name]
        return getattr(found, found.WhichOneof("value"))


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Listens on `endpoint` while the body runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[CollectedSpan] = []
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.stop(0).wait()

    def Export(self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any) -> Any:
        with self._lock:
            for resource in request.resource_spans:
                names = [item.value.string_value for item in resource.resource.attributes if item.key == "service.name"]
                self._spans += [CollectedSpan(names[0], span) for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def spans(self) -> list[CollectedSpan]:
        """All so far."""
        with self._lock:
            return list(self._spans)

    def named(self, service: str, name: str) -> list[CollectedSpan]:
        """Those of one service and name."""
        return [span for span in self.spans if (span.service, span.name) == (service, name)]
