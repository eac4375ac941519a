"""Triton kernels compiled for an AMD GPU on a machine without one: Triton's package holds the whole AMD compiler, down to the code object (hsaco)."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from triton.runtime.jit import JITFunction


@dataclass(frozen=True, slots=True)
class CompiledLaunch:
    """One launch: what its kernel became for the architecture that this process pretends to have. `lds_bytes`: local memory per workgroup."""

    kernel: str
    num_warps: int
    lds_bytes: int
    hsaco_bytes: int


@contextmanager
def compiled_launches() -> Iterator[list[CompiledLaunch]]:
    """While it lasts, launching a kernel compiles it, appends to what this yields, and runs nothing: outputs keep what they held. Tensors may be on
    the meta device. For a process that does not interpret (TRITON_INTERPRET=0)."""
    launches: list[CompiledLaunch] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **keywords)
        launches.append(
            CompiledLaunch(
                kernel=self.fn.__name__,
                num_warps=kernel.metadata.num_warps,
                lds_bytes=kernel.metadata.shared,
                hsaco_bytes=len(kernel.asm["hsaco"]),
            )
        )
        return kernel

    JITFunction.run = compile_only
    try:
        yield launches
    finally:
        JITFunction.run = run
