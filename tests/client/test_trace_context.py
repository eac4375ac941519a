"""A program that traces by OpenTelemetry has its span passed on with every call; one that does not pays nothing."""

import subprocess
import sys

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler

from tessera.client.connection import with_trace

TOKEN = (("authorization", "Bearer x"),)


@pytest.mark.parametrize(("sampler", "flags"), [(ALWAYS_ON, {"01", "03"}), (ALWAYS_OFF, {"00", "02"})])
def test_the_present_span_goes_along_sampled_or_not(sampler: Sampler, flags: set[str]) -> None:
    with TracerProvider(sampler=sampler).get_tracer("test").start_as_current_span("mine") as span:
        token, (key, value) = with_trace(TOKEN)
    version, trace_id, span_id, said = value.split("-")
    assert (token, key, version) == (TOKEN[0], "traceparent", "00") and said in flags
    context = span.get_span_context()
    assert (trace_id, span_id) == (f"{context.trace_id:032x}", f"{context.span_id:016x}")


def test_without_a_span_nothing_goes_along() -> None:
    assert with_trace(TOKEN) == TOKEN


def test_a_program_without_opentelemetry_does_not_get_it() -> None:
    code = (
        "import sys, tessera.client.connection as c; c.with_trace(()); print([n for n in sys.modules if 'opentelemetry' in n])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
