"""How the CPU kernels come to be compiled, and what is said where they cannot be."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from model_worker.kernels.cpu import build as builder
from model_worker.kernels.cpu import library
from model_worker.kernels.cpu.build import LEVELS, BuildFailed, build, level_of, library_path
from model_worker.kernels.cpu.library import KernelsMissing, cpu_library, needs_compiling, what_is_missing

AVX2 = LEVELS[-1]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where libraries are kept, empty so far."""
    monkeypatch.setattr(builder, "_FOLDER", tmp_path)
    return tmp_path / "built"


def compiler(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `script`, in which `$out` is the file to be made, for a compiler."""
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\nfor out; do :; done\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))


def test_the_best_level_that_a_processor_has_is_taken() -> None:
    everything = frozenset[str]().union(*(level.flags for level in LEVELS))
    known = (everything, everything - {"avx512_bf16"}, everything - {"avx512_vnni"}, AVX2.flags)
    assert [level_of(flags) for flags in known] == list(LEVELS)
    assert level_of(everything - {"f16c"} - LEVELS[0].flags) is None and level_of(frozenset()) is None


def test_a_library_is_compiled_once_and_those_of_older_sources_go(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(tmp_path, f'echo made > "$out"; echo once >> {tmp_path}/times', monkeypatch)
    folder.mkdir()
    stale, of_another_level = folder / f"{AVX2.name}-0123456789abcdef.so", folder / f"{LEVELS[1].name}-0123456789abcdef.so"
    for path in (stale, of_another_level):
        path.touch()
    made = build(AVX2)
    assert made == build(AVX2) == library_path(AVX2) and made.read_text() == "made\n"
    assert (tmp_path / "times").read_text() == "once\n"
    assert sorted(folder.iterdir()) == sorted((made, of_another_level))


def test_two_who_compile_at_once_do_not_harm_each_other(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each goes on only when both have begun."""
    begun = 'mkdir -p "$at"; touch "$at/$$"; while [ "$(ls "$at" | wc -l)" -lt 2 ]; do sleep 0.01; done'
    compiler(tmp_path, f'at={tmp_path}/begun; {begun}; echo made > "$out"', monkeypatch)
    with ThreadPoolExecutor(2) as both:
        made = list(both.map(build, (AVX2, AVX2)))
    assert made == [library_path(AVX2)] * 2 and made[0].read_text() == "made\n"
    assert list(folder.iterdir()) == made[:1]


def test_without_a_compiler_it_is_said_what_to_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(builder.shutil, "which", lambda name: None)
    with pytest.raises(BuildFailed, match=r"there is no C\+\+ compiler: apt-get install g\+\+, then start again"):
        build(AVX2)


def test_what_a_compiler_says_is_passed_on_and_nothing_is_left(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(tmp_path, 'echo half > "$out"; echo "simd.hpp: no such thing" >&2; exit 1', monkeypatch)
    with pytest.raises(BuildFailed, match=r"-march=x86-64-v3 .*product\.cpp.*\nsimd\.hpp: no such thing"):
        build(AVX2)
    assert not list(folder.iterdir())


@pytest.mark.parametrize("cannot", ["compiler", "folder"])
def test_what_the_system_refuses_is_no_other_failure(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cannot: str
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    if cannot == "folder":
        folder.touch()
    with pytest.raises(BuildFailed, match=r"cannot be compiled to .*built with no-such-compiler: .*(No such file|File exists)"):
        build(AVX2)


def test_who_needs_them_learns_why_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    library._compiled.cache_clear()
    cpu_library.cache_clear()
    monkeypatch.setattr(library, "processor_flags", lambda: frozenset())
    assert what_is_missing() == "this processor has no AVX2" and not needs_compiling()
    with pytest.raises(KernelsMissing, match="no AVX2"):
        cpu_library(1)


def test_a_library_that_cannot_be_loaded_is_as_good_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.so"
    broken.write_text("no library")
    library._compiled.cache_clear()
    monkeypatch.setattr(library, "processor_flags", lambda: AVX2.flags)
    monkeypatch.setattr(library, "build", lambda level: broken)
    assert "broken.so" in (what_is_missing() or "")


def test_setup_goes_on_without_them(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(level: builder.Level) -> Path:
        raise BuildFailed("there is no C++ compiler")

    monkeypatch.setattr(builder, "processor_flags", lambda: AVX2.flags)
    monkeypatch.setattr(builder, "build", fail)
    builder.main()
    assert "there is no C++ compiler" in capsys.readouterr().err
    monkeypatch.setattr(builder, "processor_flags", lambda: frozenset())
    builder.main()
    assert "no AVX2" in capsys.readouterr().out


def test_an_image_gets_every_level_or_is_not_made(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(builder.sys, "argv", ["build", "--all"])
    monkeypatch.setattr(builder, "processor_flags", frozenset)
    compiler(tmp_path, 'echo made > "$out"', monkeypatch)
    builder.main()
    made = sorted(library_path(level) for level in LEVELS)
    assert sorted(folder.iterdir()) == made
    assert capsys.readouterr().out.count("ok  ") == len(LEVELS)
    made[0].unlink()
    compiler(tmp_path, "echo no such option >&2; exit 1", monkeypatch)
    with pytest.raises(SystemExit, match="no such option"):
        builder.main()
