"""Every call of ours fits what AITER declares: in the published wheel (its source as it is installed here) and at its head (a snapshot, see `snapshot`).

Names, positions, required arguments; for compiled functions the types too. What a function computes is another test's matter.
"""

import inspect
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from model_worker.kernels.aiter.library import AiterUnavailable
from model_worker.kernels.aiter.native_calls import NativeCalls
from model_worker.kernels.aiter.triton_calls import TritonCalls
from tests.aiter import example_calls, snapshot
from tests.aiter.declarations import AiterSource, Declaration, published
from tests.aiter.declared_library import DeclaredLibrary, WrongCall, check

ONLY_AT_HEAD = {"silu_and_mul"}
"""Methods of TritonCalls whose kernels the published wheel has not."""

ERAS = {"wheel": published().declaration, "head": snapshot.declared_at_head}


@pytest.fixture(params=ERAS)
def era(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def library(era: str, arch: str) -> DeclaredLibrary:
    return DeclaredLibrary(arch, ERAS[era])


def test_every_call_has_an_example() -> None:
    assert set(example_calls.TRITON) == example_calls.method_names(TritonCalls)
    assert set(example_calls.NATIVE) == example_calls.method_names(NativeCalls)


@pytest.mark.parametrize("method", example_calls.TRITON)
def test_a_triton_call_fits_its_declaration(method: str, library: DeclaredLibrary, era: str) -> None:
    if era == "wheel" and method in ONLY_AT_HEAD:
        with pytest.raises(AiterUnavailable, match=method.split("_")[0]):
            example_calls.TRITON[method](TritonCalls(library))
        return
    example_calls.TRITON[method](TritonCalls(library))


@pytest.mark.parametrize("method", example_calls.NATIVE)
def test_a_native_call_fits_its_declaration(method: str, library: DeclaredLibrary) -> None:
    example_calls.NATIVE[method](NativeCalls(library))


def test_the_snapshot_holds_what_is_called_and_says_of_which_commit() -> None:
    library = DeclaredLibrary("gfx942", snapshot.declared_at_head)
    for example in example_calls.TRITON.values():
        example(TritonCalls(library))
    for example in example_calls.NATIVE.values():
        example(NativeCalls(library))
    kept = json.loads(snapshot.HEAD.read_text())
    assert {f"{module}:{name}" for module, name in library.asked} == set(kept["functions"])
    assert len(kept["commit"].split()[0]) == 40


def declared(text: str, folder: Path) -> Declaration:
    """Of a function `f` in a package that is one file."""
    (folder / "aiter").mkdir()
    (folder / "aiter" / "__init__.py").write_text(text)
    return AiterSource(folder).declaration("aiter", "f")


@pytest.mark.parametrize(
    ("args", "keywords", "complaint"),
    [
        ((), {"x": torch.ones(1), "scale": 0.5, "cut": 1}, "cut"),
        ((), {"x": torch.ones(1)}, "scale"),
        ((torch.ones(1), 0.5, True), {}, "too many"),
        ((), {"x": 1.0, "scale": 0.5}, "x is Tensor"),
        ((), {"x": torch.ones(1), "scale": 0.5, "bias": 1}, r"bias is Tensor \| None"),
    ],
)
def test_a_wrong_call_is_told(args: tuple[Any, ...], keywords: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    declaration = declared(
        '@compile_ops("module_f")\ndef f(x: Tensor, scale: float, *, bias: Tensor | None = None): ...', tmp_path
    )
    assert declaration.is_compiled
    check("f", declaration, (torch.ones(1), 0.5), {"bias": None})
    with pytest.raises(WrongCall, match=complaint):
        check("f", declaration, args, keywords)


def test_what_is_read_of_the_wheel_is_what_it_has_when_imported(arch: str) -> None:
    library = DeclaredLibrary(arch, published().declaration)
    for method in set(example_calls.TRITON) - ONLY_AT_HEAD:
        example_calls.TRITON[method](TritonCalls(library))
    assert len(library.asked) > 10
    for module, name in library.asked:
        imported = inspect.signature(getattr(import_module(module), name)).parameters.values()
        read = published().declaration(module, name).parameters
        assert [(p.name, p.kind) for p in read] == [(p.name, p.kind) for p in imported], f"{module}.{name}"


def test_what_is_read_of_a_compiled_function_is_what_torch_registers() -> None:
    read = published().declaration("aiter", "reshape_and_cache").parameters
    aiter = import_module("aiter")
    assert callable(aiter.reshape_and_cache)
    registered = torch.ops.aiter.reshape_and_cache.default._schema.arguments
    assert [p.name for p in read] == [argument.name for argument in registered]
