"""Every call of a server, counted by service, method and code, under the names of go-grpc-prometheus; and why calls were refused."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from prometheus_client import CollectorRegistry, Counter, Histogram

from services.rpc.errors import ServiceError
from services.rpc.handler_wrapping import status_code_of, wrapped_handler
from services.rpc.status import code_of

SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

_LABELS = ("grpc_type", "grpc_service", "grpc_method")


class CallMetrics(grpc.aio.ServerInterceptor):
    """Put it before the `ErrorInterceptor`: it counts the status that a client is told. Methods that nobody serves are not counted, so there
    are no more labels than methods."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._started = Counter("grpc_server_started", "Calls begun.", _LABELS, registry=registry)
        self._handled = Counter("grpc_server_handled", "Calls ended, by code.", (*_LABELS, "grpc_code"), registry=registry)
        self._seconds = Histogram(
            "grpc_server_handling_seconds",
            "How long calls took; a stream counts with its whole life.",
            _LABELS,
            buckets=SECONDS,
            registry=registry,
        )
        text = "Calls that were refused, or ended by an error that their clients are told of, by its reason."
        self._refused = Counter("tessera:refused_calls", text, ("grpc_code", "reason"), registry=registry)

    def note_refusal(self, error: ServiceError) -> None:
        """A call ends with `error`. Its reason is a label, so reasons are words of ours, never a caller's."""
        self._refused.labels(_spelled(code_of(error)), error.reason).inc()

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Wrap the handler found for this call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        _, service, method = handler_call_details.method.rsplit("/", 2)
        labels = (_type_of(handler), service, method)
        return wrapped_handler(handler, lambda context: self._call(labels, context))

    @contextmanager
    def _call(self, labels: tuple[str, ...], context: Any) -> Iterator[None]:
        self._started.labels(*labels).inc()
        began_s, code = time.monotonic(), "Unknown"
        try:
            yield
            code = _code_of(context, grpc.StatusCode.OK)
        except (asyncio.CancelledError, GeneratorExit):
            code = "Canceled"
            raise
        except Exception:
            code = _code_of(context, grpc.StatusCode.UNKNOWN)
            raise
        finally:
            self._handled.labels(*labels, code).inc()
            self._seconds.labels(*labels).observe(time.monotonic() - began_s)


def _type_of(handler: Any) -> str:
    if handler.request_streaming:
        return "bidi_stream" if handler.response_streaming else "client_stream"
    return "server_stream" if handler.response_streaming else "unary"


def _code_of(context: Any, default: grpc.StatusCode) -> str:
    """The call's code as Go spells it: `OK`, `NotFound`, `ResourceExhausted`."""
    code = status_code_of(context, default)
    if code is grpc.StatusCode.OK:
        return "OK"
    return _spelled(code)


def _spelled(code: grpc.StatusCode) -> str:
    return "Canceled" if code is grpc.StatusCode.CANCELLED else str(code.name).title().replace("_", "")
