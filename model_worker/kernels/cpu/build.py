"""Compile the kernels: `python -m model_worker.kernels.cpu.build`. `make setup` does it; without a compiler workers compute with torch alone.

`--all` compiles for every level instead of this machine's: what builds an image does not know where it will run, and no compiler goes along.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).parent
_SOURCES = _FOLDER / "source"

_OPTIONS = (
    *("-std=c++20", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fvisibility=hidden", "-fPIC", "-shared", "-pthread"),
    *("-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized"),  # GCC 12 takes _mm512_undefined_ps at its word
)


class BuildFailed(Exception):
    """There is no compiler, or it did not take the sources; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Level:
    """A generation of x86 processors. `flags` as /proc/cpuinfo calls what it needs."""

    name: str
    options: tuple[str, ...]
    flags: frozenset[str]


_AVX512 = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})

LEVELS = (
    Level(
        "avx512bf16",
        ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"),
        _AVX512 | {"avx512_vnni", "avx512_bf16"},
    ),
    Level("avx512vnni", ("-march=x86-64-v4", "-mavx512vnni"), _AVX512 | {"avx512_vnni"}),
    Level("avx512", ("-march=x86-64-v4",), _AVX512),
    Level("avx2", ("-march=x86-64-v3",), frozenset({"avx2", "fma", "f16c", "bmi2"})),
)
"""The best first."""


def level_of(flags: frozenset[str]) -> Level | None:
    """The best one that a processor with these flags has."""
    return next((level for level in LEVELS if level.flags <= flags), None)


def processor_flags() -> frozenset[str]:
    """Of this machine; none where it is no x86, or does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), ()))


def library_path(level: Level) -> Path:
    """Where these very sources, compiled for `level`, lie or would lie."""
    digest = hashlib.sha256(" ".join((*_OPTIONS, *level.options)).encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return _FOLDER / "built" / f"{level.name}-{digest.hexdigest()[:16]}.so"


def build(level: Level) -> Path:
    """Compile for `level`, unless that is done; those of other sources are deleted. Safe beside others who do the same. Raises BuildFailed."""
    target = library_path(level)
    if target.exists():
        return target
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise BuildFailed("there is no C++ compiler: apt-get install g++, then start again")
    try:
        target.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            made = Path(scratch) / target.name
            _compile(compiler, level, made)
            made.replace(target)
    except OSError as error:
        raise BuildFailed(f"the kernels cannot be compiled to {target.parent} with {compiler}: {error}") from error
    for old in target.parent.glob(f"{level.name}-*.so"):
        if old != target:
            old.unlink(missing_ok=True)
    return target


def _compile(compiler: str, level: Level, target: Path) -> None:
    sources = map(str, sorted(_SOURCES.glob("*.cpp")))
    command = [*shlex.split(compiler), *_OPTIONS, *level.options, *sources, "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildFailed(f"{' '.join(command)}\n{done.stderr.strip()[-4000:]}")


def _build_all() -> None:
    """Compile for every level, and say so; ends the process with status 1 where one fails."""
    try:
        for level in LEVELS:
            print(f"ok  {build(level).name}")
    except BuildFailed as error:
        sys.exit(f"CPU kernels were not compiled.\n{error}")


def main() -> None:
    """Compile for this machine, and say how it went: on one that cannot, that is no failure."""
    if sys.argv[1:] == ["--all"]:
        _build_all()
        return
    level = level_of(processor_flags())
    if level is None:
        print("this processor has no AVX2: workers compute with torch alone")
        return
    started = time.monotonic()
    try:
        path = build(level)
    except BuildFailed as error:
        print(
            f"CPU kernels were not compiled, so workers compute with torch alone, several times slower.\n{error}",
            file=sys.stderr,
        )
        return
    print(f"ok  {time.monotonic() - started:.0f} s, {path.name}")


if __name__ == "__main__":
    main()
