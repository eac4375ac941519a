"""Writes the tables of docs/aiter.md, what proves each kernel: `python -m tests.aiter_table`, or `make aiter-table`. Needs neither AITER nor Triton."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from model_worker.kernels.aiter.native_calls import NativeCalls
from model_worker.kernels.aiter.triton_calls import TritonCalls
from tests.aiter import example_calls, snapshot
from tests.aiter.declared_library import DeclaredLibrary
from tests.aiter.kernel_table import GFX950_KERNELS, NATIVE_KINDS, ONLY_AT_HEAD, TRITON_KERNELS

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "aiter.md"
TESTS = ROOT / "tests" / "aiter"


def functions(calls: Callable[[DeclaredLibrary], Any], example: Callable[[Any], object]) -> str:
    """Which of AITER's functions an example calls."""
    library = DeclaredLibrary("gfx942", snapshot.declared_at_head)
    example(calls(library))
    return ", ".join(f"`{module}.{name}`".replace("aiter.ops.triton.", "") for module, name in sorted(library.asked))


def tested_in(call: str, files: str) -> list[str]:
    """The tests that make a call, by its text."""
    return [file.name for file in sorted(TESTS.glob(files)) if re.search(rf"\b{re.escape(call)}\b", file.read_text())]


def triton() -> str:
    """One line per method of TritonCalls."""
    lines = [
        "| call | AITER's function | kernels | declared in wheel, at head | values, interpreted | compiled | run on a GPU |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for method in sorted(example_calls.TRITON):
        if isinstance(getattr(TritonCalls, method), property):
            continue
        function = functions(TritonCalls, example_calls.TRITON[method])
        if method in ONLY_AT_HEAD:
            lines.append(f"| `{method}` | {function} | | at head alone | no | no | no |")
            continue
        extra = [f"`{name}` on gfx950" for name in sorted(GFX950_KERNELS.get(method, ()))]
        kernels = ", ".join([f"`{name}`" for name in sorted(TRITON_KERNELS[method])] + extra)
        (file,) = tested_in(f"triton_calls.{method}", "test_triton_call_*.py")
        lines.append(f"| `{method}` | {function} | {kernels} | both | `tests/aiter/{file}` | gfx942, gfx950 | no |")
    return "\n".join(lines)


def native() -> str:
    """One line per method of NativeCalls."""
    lines = [
        "| call | AITER's function | kernels are | declared in wheel, at head | through the wheel's declaration | executed |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for method in sorted(example_calls.NATIVE):
        (file,) = tested_in(f"calls.{method}", "test_native_calls.py")
        is_executed = NATIVE_KINDS[method] == "torch"
        lines.append(
            f"| `{method}` | {functions(NativeCalls, example_calls.NATIVE[method])} | {NATIVE_KINDS[method]} | both "
            f"| `tests/aiter/{file}` | {'yes' if is_executed else 'no'} |"
        )
    return "\n".join(lines)


def with_tables(text: str) -> str:
    """The document with its two tables made anew."""
    for title, table in (("triton", triton()), ("native", native())):
        pattern = rf"(<!-- {title} -->\n).*?(\n<!-- end of {title} -->)"
        text, count = re.subn(pattern, lambda found, table=table: found[1] + table + found[2], text, flags=re.DOTALL)
        assert count == 1, f"{count} tables of {title} in {DOCUMENT}"
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text()))
