"""The span of the call that the present task serves, for whoever knows more of the call than its method and its code."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.trace import Span
    from opentelemetry.util.types import AttributeValue

    from services.rpc.spans import Tracing


@dataclass(frozen=True, slots=True)
class CallSpan:
    """A sampled span, and how it is named to other processes."""

    tracing: "Tracing"
    span: "Span"
    trace_context: str


_PRESENT: ContextVar[CallSpan | None] = ContextVar("call_span", default=None)


def set_call_span(present: CallSpan) -> None:
    """For the rest of this call, which is a task of its own."""
    _PRESENT.set(present)


def is_traced() -> bool:
    """Whether the present call has a span."""
    return _PRESENT.get() is not None


def trace_context() -> str:
    """The present call's span, as it is named to other processes; empty where it has none."""
    present = _PRESENT.get()
    return present.trace_context if present is not None else ""


def tell_span(attributes: "Mapping[str, AttributeValue]") -> None:
    """Add to the present call's span; a no-op where it has none."""
    present = _PRESENT.get()
    if present is not None:
        present.span.set_attributes(attributes)


@contextmanager
def child_span(name: str) -> Iterator[None]:
    """A part of the present call, for as long as the body runs; nothing where it has no span."""
    present = _PRESENT.get()
    if present is None:
        yield
        return
    span = present.tracing.begin(name, present.trace_context)
    try:
        yield
    finally:
        span.end()
