"""docs/aiter.md says of every call of AITER what proves it, and cannot go stale."""

from model_worker.kernels.aiter.native_calls import NativeCalls
from model_worker.kernels.aiter.triton_calls import TritonCalls
from tests.aiter import example_calls
from tests.aiter.compiler.launches import LAUNCHES
from tests.aiter.kernel_table import NATIVE_KINDS, ONLY_AT_HEAD, TRITON_KERNELS
from tests.aiter_table import DOCUMENT, with_tables


def test_the_document_shows_the_tables() -> None:
    text = DOCUMENT.read_text()
    assert text == with_tables(text), "run `make aiter-table`"


def test_every_call_is_in_the_tables() -> None:
    triton, native = example_calls.method_names(TritonCalls), example_calls.method_names(NativeCalls)
    assert set(example_calls.TRITON) == triton
    assert set(TRITON_KERNELS) == set(LAUNCHES) == triton - ONLY_AT_HEAD
    assert set(example_calls.NATIVE) == set(NATIVE_KINDS) == native
