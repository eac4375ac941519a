"""A span for every call of a server, by OpenTelemetry's conventions for RPCs."""

import asyncio
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.trace import Span, SpanKind, StatusCode

from services.rpc.call_span import CallSpan, set_call_span
from services.rpc.handler_wrapping import status_code_of, wrapped_handler
from services.rpc.spans import Tracing, trace_context_of

SERVER_FAULTS = frozenset(
    (
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    )
)
"""Codes that the conventions count as errors of a server's span; the others are the client's doing."""


class CallTraces(grpc.aio.ServerInterceptor):
    """Traces the calls of `services` (full names; the server adds to them): under the span of the client where its metadata name one, and
    only if that is sampled. Put it outside the `ErrorInterceptor`: it tells the status that a client is told."""

    def __init__(self, tracing: Tracing, services: Container[str]) -> None:
        self._tracing = tracing
        self._services = services

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Wrap the handler found for this call."""
        handler = await continuation(handler_call_details)
        _, service, method = handler_call_details.method.rsplit("/", 2)
        if handler is None or service not in self._services:
            return handler
        metadata = {key: value for key, value in handler_call_details.invocation_metadata or () if isinstance(value, str)}
        return wrapped_handler(handler, lambda context: self._call(service, method, metadata, context))

    @contextmanager
    def _call(self, service: str, method: str, metadata: Mapping[str, str], context: Any) -> Iterator[None]:
        told = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}
        span = self._tracing.begin(f"{service}/{method}", metadata, told, kind=SpanKind.SERVER)
        if sampled := trace_context_of(span):
            set_call_span(CallSpan(self._tracing, span, sampled))
        code = grpc.StatusCode.UNKNOWN
        try:
            yield
            code = status_code_of(context, grpc.StatusCode.OK)
        except (asyncio.CancelledError, GeneratorExit):
            code = grpc.StatusCode.CANCELLED
            raise
        except Exception:
            code = status_code_of(context, grpc.StatusCode.UNKNOWN)
            raise
        finally:
            _end(span, code, context)


def _end(span: Span, code: grpc.StatusCode, context: Any) -> None:
    span.set_attribute("rpc.grpc.status_code", code.value[0])
    if code in SERVER_FAULTS:
        span.set_status(StatusCode.ERROR, str(code.name))
    span.end()
