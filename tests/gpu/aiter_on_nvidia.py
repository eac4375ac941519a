"""AITER's Triton kernels on an NVIDIA GPU. Triton compiles them for it; what is AMD's alone is in AITER's Python around them:

- at import it asks for ROCm and for the GPU's architecture: it is imported as on an MI350, whose 8-bit floats are those of NVIDIA's GPUs;
- its tile sizes are looked up by that architecture, so they are not made for this GPU: right, and slow;
- it launches with options that Triton knows for AMD alone: these are left out.
"""

import importlib
from pathlib import Path
from typing import Any

from model_worker.kernels.aiter.library import AiterLibrary

ARCH = "gfx950"

AMD_OPTIONS = ("waves_per_eu", "matrix_instr_nonkdim", "kpack", "schedule_hint")

MODULES = (
    "rmsnorm",
    "norm",
    "rope",
    "fused_kv_cache",
    "unified_attention",
    "unified_attention_sparse_mla",
    "mla_decode_rope",
    "gemm_a16w16",
    "gemm_a8w8",
    "gemm_a8w8_blockscale",
    "quant",
    "fused_fp8_quant",
    "activation",
    "moe_align_block_size",
    "moe_op",
)
"""Of `aiter.ops.triton`: those that the worker calls. All are imported while this machine looks like AMD's."""


def load(folder: Path, driver: Any = None) -> AiterLibrary:
    """Once in a process that has imported no aiter yet. `folder`: an empty one; `driver`: what launches kernels from then on, None for the GPU's own.
    Raises AiterUnavailable, ImportError."""
    import triton
    from triton.runtime.jit import JITFunction

    from tests.aiter import compiled_modules, fake_rocm

    fake_rocm.pretend(ARCH, folder)
    compiled_modules.install()
    library = AiterLibrary(ARCH)
    for name in MODULES:
        importlib.import_module(f"aiter.ops.triton.{name}")
    importlib.import_module("aiter.ops.triton.utils._triton.arch_info").get_arch = lambda: ARCH  # type: ignore[attr-defined]
    if driver is None:
        triton.runtime.driver.reset_active()
    else:
        triton.runtime.driver.set_active(driver)
    run = JITFunction.run

    def run_here(self: Any, *args: Any, **keywords: Any) -> Any:
        known = {parameter.name for parameter in self.params}
        kept = {name: value for name, value in keywords.items() if name in known or name not in AMD_OPTIONS}
        return run(self, *args, **kept)

    JITFunction.run = run_here  # type: ignore[method-assign]
    return library
