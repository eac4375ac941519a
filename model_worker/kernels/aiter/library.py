"""AITER (github.com/ROCm/aiter) as found on this machine: imported late, its functions called by keyword.

AITER has no stable interface: between its published wheel and its head, parameters were added, some of them in the middle. So nothing is
called by position, and what a function takes is read from its declaration, never from a version.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tessera.values.config import ConfigError

_FNUZ_ARCHS = frozenset({"gfx940", "gfx941", "gfx942"})
"""Their 8-bit floats have no negative zero and half the range; later GPUs follow the OCP standard."""


class AiterUnavailable(ConfigError):
    """AITER cannot be used here, or lacks something; the message says what, and what to do."""


@dataclass(frozen=True, slots=True)
class Newer:
    """An argument that older AITERs do not know. It is left out there while it is `neutral`; otherwise the call is an AiterUnavailable."""

    value: Any
    neutral: bool | None = None


@dataclass(frozen=True, slots=True)
class AiterFunction:
    """One of AITER's functions. `parameters`: the names that its declaration has; None: any."""

    name: str
    function: Callable[..., Any]
    parameters: frozenset[str] | None

    def __call__(self, **arguments: Any) -> Any:
        """Call it by keywords. Raises AiterUnavailable for a keyword that this AITER does not know."""
        return self.function(**self.keywords(arguments))

    def keywords(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """`arguments` as this AITER takes them, see `Newer`."""
        taken = {}
        for name, value in arguments.items():
            is_known = self.takes(name)
            if isinstance(value, Newer):
                if not is_known and value.value is value.neutral:
                    continue
                value = value.value
            if not is_known:
                raise AiterUnavailable(f"this aiter's {self.name} takes no {name}: install another version of aiter")
            taken[name] = value
        return taken

    def takes(self, name: str) -> bool:
        """Whether its declaration has this parameter."""
        return self.parameters is None or name in self.parameters


class AiterLibrary:
    """AITER for GPUs of one architecture. `arch` as ROCm names it (gfx942). Whoever makes one vouches that AITER's kernels run here: the
    worker takes `for_device`, tests give an architecture to an interpreter. Raises AiterUnavailable."""

    def __init__(self, arch: str) -> None:
        self.arch = arch
        self._functions: dict[tuple[str, str], AiterFunction] = {}
        spec = self._import("aiter").__spec__
        if spec is not None and spec.origin is None:  # some folder of that name
            raise AiterUnavailable("aiter is not installed: install it for this ROCm and torch, or choose kernels torch")

    @classmethod
    def for_device(cls, device: torch.device) -> "AiterLibrary":
        """For a GPU under ROCm. Raises AiterUnavailable."""
        if torch.version.hip is None:
            raise AiterUnavailable("aiter needs torch for ROCm, and this torch is not: install it, or choose kernels torch")
        if device.type != "cuda":
            raise AiterUnavailable(f"aiter needs an AMD GPU, and device is {device}: choose device cuda, or kernels torch")
        if not torch.cuda.is_available():
            raise AiterUnavailable("aiter needs an AMD GPU, and ROCm shows none: see rocminfo, or choose kernels torch")
        return cls(str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0])

    @property
    def fp8(self) -> torch.dtype:
        """The 8-bit float that the architecture computes with."""
        return torch.float8_e4m3fnuz if self.arch in _FNUZ_ARCHS else torch.float8_e4m3fn

    def function(self, module: str, name: str) -> AiterFunction:
        """For example `function("aiter.ops.triton.rmsnorm", "rms_norm")`; a method as `tgemm.mm`. Modules of AITER's Triton kernels go by their old, flat names, which
        every version knows. Raises AiterUnavailable where this AITER has no such function."""
        key = (module, name)
        if key not in self._functions:
            function = self._import(module)
            for part in name.split("."):
                function = getattr(function, part, None)
            if function is None:
                raise AiterUnavailable(f"this aiter has no {module}.{name}: install another version of aiter")
            self._functions[key] = AiterFunction(f"{module}.{name}", function, _parameters(function))
        return self._functions[key]

    def has(self, module: str, name: str) -> bool:
        """Whether `function` gives one."""
        try:
            self.function(module, name)
        except AiterUnavailable:
            return False
        return True

    def require_tile_sizes(self) -> None:
        """Raises AiterUnavailable where this AITER's Triton kernels have tables of tile sizes for other architectures alone: its older versions look
        them up by the name of the GPU."""
        module = "aiter.ops.triton.utils._triton.arch_info"
        if self.has(module, "get_device"):
            try:
                self.function(module, "get_device")()
            except KeyError as error:
                raise AiterUnavailable(
                    f"this aiter has no tile sizes for {self.arch}: install a newer one, or choose kernels torch"
                ) from error

    def forget(self, module: str, name: str) -> None:
        """Let a function that remembers what it gave (`functools.lru_cache`) forget it; a no-op for one that does not."""
        clear = getattr(getattr(self._import(module), name, None), "cache_clear", None)
        if clear is not None:
            clear()

    def triton_dtype(self, dtype: torch.dtype) -> Any:
        """What Triton calls a dtype of torch."""
        return getattr(self._import("triton.language"), str(dtype).removeprefix("torch."))

    def _import(self, module: str) -> Any:
        try:
            return importlib.import_module(module)
        # At import AITER asks for ROCm's version, the GPU and its modules, and fails in as many ways.
        except (ImportError, OSError, RuntimeError, KeyError, AttributeError) as error:
            raise AiterUnavailable(
                f"cannot import {module}: {error!r}: install aiter for this ROCm and torch, or choose kernels torch"
            ) from error


def _parameters(function: Callable[..., Any]) -> frozenset[str] | None:
    try:
        declared = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a compiled function without a declaration
        return None
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in declared)
    return None if takes_any else frozenset(parameter.name for parameter in declared)
