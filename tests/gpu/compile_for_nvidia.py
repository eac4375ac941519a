"""Compile AITER's Triton kernels for an NVIDIA H100 on a machine without one, as `aiter_on_nvidia` loads and launches them: run
`python -m tests.gpu.compile_for_nvidia` where AITER is installed. Proves that they compile and fit, not what they compute.

Prints a line per kernel: its name, and the shared memory of a block. Exits 1 for one that needs more than there is.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.gpu import aiter_on_nvidia

SHARED_BYTES = 227 * 1024
"""Shared memory that one block of an H100 can have."""


def main() -> int:
    """The exit status."""
    import torch
    from triton.backends.compiler import GPUTarget

    from tests.aiter import fake_rocm

    if not torch.cuda.is_available():
        fake_rocm.stand_in_for_cuda(aiter_on_nvidia.ARCH)
    with tempfile.TemporaryDirectory() as folder:
        driver = fake_rocm.FakeDriver(aiter_on_nvidia.ARCH)
        driver.target = GPUTarget("cuda", 90, 32)
        return _compile(aiter_on_nvidia.load(Path(folder), driver))


def _compile(library: Any) -> int:
    from triton.runtime.jit import JITFunction

    from model_worker.kernels.aiter.triton_calls import TritonCalls
    from tests.aiter.compiler.launches import LAUNCHES

    largest: dict[str, int] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **keywords)
        assert kernel.asm["cubin"]
        name = self.fn.__name__
        largest[name] = max(largest.get(name, 0), kernel.metadata.shared)
        return kernel

    JITFunction.run = compile_only  # type: ignore[method-assign]
    calls = TritonCalls(library)
    for launches in LAUNCHES.values():
        for launch in launches.values():
            launch(calls)
    for name, size in sorted(largest.items()):
        print(f"{name}: {size} bytes of shared memory{'' if size <= SHARED_BYTES else ', which is too much'}")
    return int(max(largest.values()) > SHARED_BYTES)


if __name__ == "__main__":
    sys.exit(main())
