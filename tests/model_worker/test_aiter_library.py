"""AITER where there is none: errors that say what is missing. What it declares is stood in for by plain modules."""

import functools
import pathlib
import sys
import types

import pytest
import torch

from model_worker.kernels.aiter.library import AiterLibrary, AiterUnavailable, Newer
from tessera.values.config import ConfigError


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> AiterLibrary:
    """An AITER with one module of functions."""
    module = types.ModuleType("aiter.ops")
    module.older = lambda x, scale=1: (x, scale)  # type: ignore[attr-defined]
    module.newer = lambda x, inserted=None, scale=1: (x, inserted, scale)  # type: ignore[attr-defined]
    module.takes_any = lambda **keywords: keywords  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "aiter", types.ModuleType("aiter"))
    monkeypatch.setitem(sys.modules, "aiter.ops", module)
    return AiterLibrary("gfx942")


def test_without_rocm_the_error_names_what_to_do() -> None:
    assert torch.version.hip is None
    with pytest.raises(AiterUnavailable, match=r"needs torch for ROCm.*choose kernels torch"):
        AiterLibrary.for_device(torch.device("cuda"))
    assert issubclass(AiterUnavailable, ConfigError)


def test_on_another_device_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(AiterUnavailable, match="device is cpu"):
        AiterLibrary.for_device(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(AiterUnavailable, match="ROCm shows none"):
        AiterLibrary.for_device(torch.device("cuda"))


def test_the_architecture_is_the_devices(monkeypatch: pytest.MonkeyPatch, library: AiterLibrary) -> None:
    properties = types.SimpleNamespace(gcnArchName="gfx950:sramecc+:xnack-")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert AiterLibrary.for_device(torch.device("cuda")).arch == "gfx950"


def test_without_aiter_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiter", None)
    with pytest.raises(AiterUnavailable, match=r"cannot import aiter: .*install aiter for this ROCm"):
        AiterLibrary("gfx942")


def test_a_folder_named_aiter_is_no_aiter(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    (tmp_path / "aiter").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "aiter", raising=False)
    with pytest.raises(AiterUnavailable, match="aiter is not installed"):
        AiterLibrary("gfx942")
    sys.modules.pop("aiter", None)


def test_each_architecture_has_its_8_bit_float(library: AiterLibrary) -> None:
    assert library.fp8 == torch.float8_e4m3fnuz
    assert AiterLibrary("gfx950").fp8 == torch.float8_e4m3fn


def test_functions_are_called_by_keyword(library: AiterLibrary) -> None:
    assert library.function("aiter.ops", "older")(scale=3, x=1) == (1, 3)
    assert library.function("aiter.ops", "newer")(scale=3, x=1) == (1, None, 3)
    assert library.function("aiter.ops", "takes_any")(other=1) == {"other": 1}


def test_an_unknown_keyword_is_an_error_that_names_it(library: AiterLibrary) -> None:
    with pytest.raises(AiterUnavailable, match=r"aiter\.ops\.older takes no inserted"):
        library.function("aiter.ops", "older")(x=1, inserted=None)


def test_a_newer_keyword_is_left_out_while_it_is_neutral(library: AiterLibrary) -> None:
    older, newer = library.function("aiter.ops", "older"), library.function("aiter.ops", "newer")
    assert older(x=1, inserted=Newer(None)) == (1, 1)
    assert newer(x=1, inserted=Newer(7)) == (1, 7, 1)
    with pytest.raises(AiterUnavailable, match="takes no inserted"):
        older(x=1, inserted=Newer(torch.ones(2)))


def test_a_function_that_is_not_there_is_an_error(library: AiterLibrary) -> None:
    assert library.has("aiter.ops", "older") and not library.has("aiter.ops", "missing")
    assert not library.has("aiter.nowhere", "older")
    with pytest.raises(AiterUnavailable, match=r"no aiter\.ops\.missing"):
        library.function("aiter.ops", "missing")


def test_a_function_that_remembers_can_be_made_to_forget(library: AiterLibrary) -> None:
    made: list[int] = []
    remembering = functools.lru_cache(made.append)
    sys.modules["aiter.ops"].remembering = remembering  # type: ignore[attr-defined]
    for number in (1, 1):
        remembering(number)
    library.forget("aiter.ops", "remembering")
    library.forget("aiter.ops", "older")
    library.forget("aiter.ops", "nowhere")
    remembering(1)
    assert made == [1, 1]
