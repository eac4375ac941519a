"""A process that looks to AITER as one with ROCm and an AMD GPU does, so that its Python and its Triton kernels load on any CPU.

Nothing here computes: Triton's interpreter (`interpreter_patches`) or its compiler (`cross_compile`) does the rest. `install` comes before the
first `import aiter`, and is for the whole process.
"""

import functools
import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch.utils._device import _device_constructors
from triton.backends.compiler import GPUTarget

ARCHS = ("gfx942", "gfx950")
"""MI300X and MI325X; MI350X and MI355X."""

LDS_BYTES = {"gfx942": 64 * 1024, "gfx950": 160 * 1024}
"""Local memory of one compute unit: the most that one workgroup can have."""

COMPUTE_UNITS = {"gfx942": 304, "gfx950": 256}


def install(arch: str, folder: Path) -> None:
    """Make this process look like a machine with one GPU of `arch`. `folder`: an empty one, for programs and AITER's own files."""
    pretend(arch, folder)
    stand_in_for_cuda(arch)
    _make_on_cpu("empty", "arange")


def pretend(arch: str, folder: Path) -> None:
    """What of `install` leaves torch's own GPU alone."""
    _put_programs_on_path(arch, folder / "bin")
    os.environ |= {
        "GPU_ARCHS": arch,
        "CU_NUM": str(COMPUTE_UNITS[arch]),
        "AITER_LOG_LEVEL": "WARNING",
        "AITER_JIT_DIR": str(folder / "jit"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    triton.runtime.driver.set_active(FakeDriver(arch))
    _strip_doubled_namespace()


class FakeDriver:
    """What Triton asks of a GPU's driver before it launches anything."""

    def __init__(self, arch: str) -> None:
        self.target = GPUTarget("hip", arch, 64)
        self.utils = types.SimpleNamespace(get_device_properties=self.get_device_properties)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> types.ModuleType:
        return torch.cpu

    def get_device_properties(self, device: int) -> dict[str, int]:
        arch = self.target.arch
        return {"multiprocessor_count": COMPUTE_UNITS[arch], "max_shared_mem": LDS_BYTES[arch], "warpSize": 64}


def _put_programs_on_path(arch: str, folder: Path) -> None:
    """AITER asks `hipconfig` for ROCm's version when it is imported, and `rocminfo` for the GPU."""
    agent = f"*******\nAgent 2\n*******\n  Name: {arch}\n  Device Type: GPU\n  Compute Unit: {COMPUTE_UNITS[arch]}"
    folder.mkdir(parents=True)
    for name, answer in {"hipconfig": "7.0.51831-a3e329ad8", "rocminfo": agent}.items():
        program = folder / name
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{answer}\nEND\n")
        program.chmod(0o755)
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"


class _Device:
    """`torch.cuda.device(...)` as a context that does nothing."""

    def __init__(self, device: object) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


def stand_in_for_cuda(arch: str) -> None:
    """What AITER asks torch about the current GPU. `torch.cuda.is_available()` stays False: tensors stay on the CPU."""
    properties = types.SimpleNamespace(
        multi_processor_count=COMPUTE_UNITS[arch], gcnArchName=arch, name="fake GPU", major=9, minor=4, total_memory=192 << 30
    )
    stream = types.SimpleNamespace(cuda_stream=0)
    answers: dict[str, Any] = {
        "current_device": lambda: 0,
        "get_device_properties": lambda *_: properties,
        "get_device_name": lambda *_: properties.name,
        "current_stream": lambda *_: stream,
        "device": _Device,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)


def _make_on_cpu(*factories: str) -> None:
    """AITER makes some tensors of its own on "cuda", wherever its arguments lie."""
    _device_constructors()  # remembers those that `with device:` is for, before they are wrapped

    def on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(make)
        def made(*args: Any, **keywords: Any) -> torch.Tensor:
            return make(*args, **{**keywords, "device": "cpu"} if keywords.get("device") == "cuda" else keywords)

        return made

    for name in factories:
        setattr(torch, name, on_cpu(getattr(torch, name)))


def _strip_doubled_namespace() -> None:
    """The published wheel names its operators with their namespace where torch now adds it: `aiter::aiter::x`."""
    library = torch.library.Library
    define, impl = library.define, library.impl

    def bare(self: torch.library.Library, name: Any) -> Any:
        return name.removeprefix(f"{self.ns}::") if isinstance(name, str) else name

    def define_bare(self: torch.library.Library, schema: str, *args: Any, **keywords: Any) -> Any:
        return define(self, bare(self, schema), *args, **keywords)

    def impl_bare(self: torch.library.Library, name: Any, *args: Any, **keywords: Any) -> Any:
        return impl(self, bare(self, name), *args, **keywords)

    library.define, library.impl = define_bare, impl_bare  # type: ignore[method-assign]
