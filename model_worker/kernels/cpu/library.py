"""The compiled kernels, as Python calls them: addresses of tensors and numbers. See `source/api.cpp`."""

import ctypes
from ctypes import POINTER, Structure, byref, c_char_p, c_float, c_int, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from model_worker.kernels.cpu.build import BuildFailed, build, level_of, library_path, processor_flags
from model_worker.kernels.cpu.weight_memory import WeightMemory

_NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
"""Of what a cache holds; bfloat16 only where the processor multiplies it."""

_P, _I, _L, _F = c_void_p, c_int, c_int64, c_float


class CacheView(Structure):
    """`tessera::Cache`: one layer of a pool."""

    _fields_ = (("keys", _P), ("values", _P), ("num_kv_heads", _I), ("block_size", _I), ("head_dim", _I))


class BatchView(Structure):
    """`tessera::BatchView`: what a batch says of its rows."""

    _fields_ = (
        ("slots", _P),
        ("starts", _P),
        ("context_lens", _P),
        ("tables", _P),
        ("rows", _I),
        ("tokens", _I),
        ("table_stride", _I),
    )


class WeightView(Structure):
    """`tessera::Weight`."""

    _fields_ = (("kind", _I), ("out", _I), ("in", _I), ("data", _P), ("bias", _P))


class MatrixView(Structure):
    """`tessera::Matrix`: float32 to be packed, strides in elements."""

    _fields_ = (("data", _P), ("out", _I), ("in", _I), ("out_stride", _L), ("in_stride", _L))


class LayerView(Structure):
    """`tessera::Layer`."""

    _fields_ = (
        ("input_norm", _P),
        ("qkv", WeightView),
        ("output", WeightView),
        ("query_norm", _P),
        ("key_norm", _P),
        ("post_norm", _P),
        ("gate_up", WeightView),
        ("down", WeightView),
        ("keys", _P),
        ("values", _P),
    )


class LayerShape(Structure):
    """`tessera::LayerShape`."""

    _fields_ = (
        ("cache_kind", _I),
        ("heads", _I),
        ("kv_heads", _I),
        ("head_dim", _I),
        ("block_size", _I),
        ("eps", _F),
        ("scale", _F),
    )


class AnglesView(Structure):
    """`tessera::Angles`."""

    _fields_ = (("cos", _P), ("sin", _P), ("pairs", _I))


class WantedView(Structure):
    """`tessera::Wanted`."""

    _fields_ = (("tokens", _P), ("count", _I))


KIND = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3}
"""`tessera::Kind`, of a weight or a cache; int8 is 8 bits with scales."""

KINDS = {torch.float32: (4, 5, 0), torch.float16: (1,), torch.bfloat16: (6, 2), torch.int8: (3,)}
"""The kinds that keep such a weight's numbers, the smallest first; the last one can keep any."""

_CACHE, _BATCH, _WEIGHT, _MATRIX = POINTER(CacheView), POINTER(BatchView), POINTER(WeightView), POINTER(MatrixView)

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "multiply": (_WEIGHT, _P, _L, _I, _P),
    "gather": (_WEIGHT, _P, _I, _P),
    "rms_norm": (_P, _P, _P, _P, _F, _P, _I, _I),
    "silu_and_mul": (_P, _P, _I, _I),
    "run_layers": (_P, _I, POINTER(LayerShape), _BATCH, POINTER(AnglesView), POINTER(WantedView), _P),
}
_TYPED_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "rotate_and_store": (_CACHE, _BATCH, _P, _L, _P, _L, _P, _P, _I, _I, _P),
    "attend": (_CACHE, _BATCH, _P, _I, _F, _P),
}


class KernelsMissing(Exception):
    """This machine has no compiled kernels, and cannot have any; the message says why, and what helps if anything does."""


class CpuLibrary:
    """The kernels, the threads that run them, and the memory of packed weights. Calls come from one thread at a time. `isa`: what they were
    compiled for."""

    def __init__(self, path: str, threads: int) -> None:
        self._library = ctypes.CDLL(path)
        self._library.tessera_isa.restype = c_char_p
        self.isa: str = self._library.tessera_isa().decode()
        new_team = self._library.tessera_team_new
        new_team.argtypes, new_team.restype = (_I,), _P
        self._team = c_void_p(new_team(threads))
        self.memory = WeightMemory()
        self._weight_bytes = self._library.tessera_weight_bytes
        self._weight_bytes.argtypes, self._weight_bytes.restype = (_I, _I, _I), _L
        self._pack = self._library.tessera_pack
        self._pack.argtypes, self._pack.restype = (_P, _MATRIX, _WEIGHT), _I
        plain = {name: self._bound(name, signature) for name, signature in _SIGNATURES.items()}
        self.multiply, self.gather = plain["multiply"], plain["gather"]
        self.rms_norm, self.silu_and_mul = plain["rms_norm"], plain["silu_and_mul"]
        self.run_layers = plain["run_layers"]
        self._typed = {
            (name, dtype): self._bound(f"{name}_{suffix}", signature)
            for name, signature in _TYPED_SIGNATURES.items()
            for dtype, suffix in _NAMES.items()
            if hasattr(self._library, f"tessera_{name}_{suffix}")
        }

    @property
    def multiplies_bfloat16(self) -> bool:
        """Whether attention does, over a cache of it."""
        return ("attend", torch.bfloat16) in self._typed

    def of(self, name: str, dtype: torch.dtype) -> Any:
        """The kernel `name` for a cache of `dtype`."""
        return self._typed[name, dtype]

    def weight_bytes(self, kind: int, out: int, inner: int) -> int:
        """What a packed weight [out, inner] needs."""
        size: int = self._weight_bytes(kind, out, inner)
        return size

    def pack(self, matrix: MatrixView, to: WeightView) -> bool:
        """Fill a weight. False: its kind, one of those that come before a plain one (see `KINDS`), cannot keep these numbers."""
        return bool(self._pack(self._team, byref(matrix), byref(to)))

    def _bound(self, name: str, signature: tuple[Any, ...]) -> Any:
        function, team = getattr(self._library, f"tessera_{name}"), self._team
        function.argtypes, function.restype = (_P, *signature), None
        return lambda *arguments: function(team, *arguments)


@cache
def cpu_library(threads: int) -> CpuLibrary:
    """That of this process; compiled now where nobody has done so. Raises KernelsMissing."""
    return CpuLibrary(_compiled(), threads)


def needs_compiling() -> bool:
    """Whether the next use of the kernels compiles them."""
    level = level_of(processor_flags())
    return level is not None and not library_path(level).exists()


def multiplies_bfloat16() -> bool:
    """Whether the kernels for this processor have products of bfloat16, which are twice as fast as those of float32."""
    level = level_of(processor_flags())
    return level is not None and "avx512_bf16" in level.flags


def what_is_missing() -> str | None:
    """Why `cpu_library` would raise; None: it would not. May compile, which takes up to a minute."""
    try:
        _compiled()
    except KernelsMissing as missing:
        return str(missing)
    return None


@cache
def _compiled() -> str:
    """Path of a library that can be loaded. Raises KernelsMissing."""
    level = level_of(processor_flags())
    if level is None:
        raise KernelsMissing("this processor has no AVX2")
    try:
        path = str(build(level))
        ctypes.CDLL(path)
    except (BuildFailed, OSError) as error:
        raise KernelsMissing(str(error)) from error
    return path


def address(tensor: Tensor | None) -> int | None:
    """Of its first element."""
    return None if tensor is None else tensor.data_ptr()


def view_of(structure: Structure) -> Any:
    """As an argument."""
    return byref(structure)
