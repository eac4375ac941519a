"""Who is compared: the product in each of its precisions, and the other engines in theirs, each in the form that is fastest."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path

from tessera.values.model import ModelInfo
from tests.benchmarks.live_system import PRECISIONS
from tests.benchmarks.peers.contender import Contender
from tests.benchmarks.peers.driven import driven
from tests.benchmarks.peers.install import (
    Home,
    gguf_model,
    install_llama_cpp,
    install_openvino,
    install_vllm,
    model_folder,
)
from tests.benchmarks.peers.llama_server import llama_server
from tests.benchmarks.peers.ours import ours

OURS_BITS = {"f32": 32, "f16": 16, "bf16": 16, "int8": 8}
BF16_FLAGS = {"avx512_bf16", "amx_bf16"}
"""A processor with one of these multiplies bfloat16 faster than float32; OpenVINO is then told to."""

Open = Callable[[], AbstractContextManager[Contender]]


@dataclass(frozen=True, slots=True)
class Entry:
    """One who may be compared. `bits` of each weight as it is computed with. `prepare` installs what is missing, raises InstallFailed, and
    returns how it is started. `takes_arrivals`: whether requests may come while others are under way."""

    name: str
    bits: int
    prepare: Callable[[], Open]
    is_ours: bool = False
    takes_arrivals: bool = True


def field(home: Home, model_name: str, model: ModelInfo) -> Iterator[Entry]:
    """All of them. Those that take longest to install come last."""
    for precision in PRECISIONS:
        yield Entry(f"tessera {precision}", OURS_BITS[precision], _ours(model_name, precision), is_ours=True)
    seats = _Seats(home, model)
    for dtype, bits in (("float32", 32), ("bfloat16", 16)):
        yield Entry(f"transformers {dtype}", bits, seats.transformers(dtype), takes_arrivals=False)
        yield Entry(f"vLLM {dtype}", bits, seats.vllm(dtype))
    # OpenVINO reads no GGUF file in F32: it makes float32 of F16, holds and computes that.
    yield Entry("OpenVINO float32", 32, seats.openvino("F16", "f32"))
    if _has_bf16():
        yield Entry("OpenVINO bfloat16", 16, seats.openvino("F16", "bf16"))
    yield Entry("OpenVINO Q8_0", 8, seats.openvino("Q8_0", "bf16" if _has_bf16() else "f32"))
    for kind, bits in (("F32", 32), ("F16", 16), ("BF16", 16), ("Q8_0", 8)):
        yield Entry(f"llama.cpp {kind}", bits, seats.llama_cpp(kind))


def _has_bf16() -> bool:
    return bool(BF16_FLAGS & set(Path("/proc/cpuinfo").read_text().split()))


def _ours(model_name: str, precision: str) -> Callable[[], Open]:
    return lambda: lambda: ours(model_name, precision)


@dataclass(frozen=True, slots=True)
class _Seats:
    """How each engine is prepared and started."""

    home: Home
    model: ModelInfo

    def transformers(self, dtype: str) -> Callable[[], Open]:
        def prepare() -> Open:
            folder = model_folder(self.home, dtype)
            return self._driven(Path(sys.executable), "transformers_generate", folder, dtype)

        return prepare

    def vllm(self, dtype: str) -> Callable[[], Open]:
        def prepare() -> Open:
            python, folder = install_vllm(self.home), model_folder(self.home, dtype)
            environment = {"VLLM_CACHE_ROOT": str(self.home.folder / "vllm-cache"), "LD_PRELOAD": _preloaded(python)}
            return self._driven(python, "vllm_engine", folder, dtype, environment)

        return prepare

    def openvino(self, kind: str, precision: str) -> Callable[[], Open]:
        def prepare() -> Open:
            python, weights = install_openvino(self.home), gguf_model(self.home, install_llama_cpp(self.home), kind)
            return self._driven(python, "openvino_pipeline", weights, precision)

        return prepare

    def llama_cpp(self, kind: str) -> Callable[[], Open]:
        def prepare() -> Open:
            programs = install_llama_cpp(self.home)
            weights = gguf_model(self.home, programs, kind)
            return lambda: llama_server(programs, weights, self._log(f"llama-server-{kind}"), self.model)

        return prepare

    def _driven(
        self, python: Path, driver: str, weights: Path, dtype: str, environment: Mapping[str, str] | None = None
    ) -> Open:
        arguments = (weights, dtype, len(os.sched_getaffinity(0)))
        log = self._log(f"{driver}-{dtype}-{weights.name}")
        return lambda: driven(python, f"{driver}.py", arguments, log, self.model, environment)

    def _log(self, name: str) -> Path:
        return self.home.folder / "logs" / f"{name}.log"


def _preloaded(python: Path) -> str:
    """What vLLM asks for, and is some per cent faster with: Intel's OpenMP, which its environment has, and tcmalloc where the system has it."""
    openmp = python.parent.parent / "lib/libiomp5.so"
    libraries = [find_library("tcmalloc_minimal"), str(openmp) if openmp.exists() else None]
    return ":".join(library for library in libraries if library)
