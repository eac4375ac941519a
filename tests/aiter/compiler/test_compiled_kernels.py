"""Every Triton kernel that we launch compiles to a code object of the architecture, at the sizes of real models, and fits its local memory."""

import pytest

from model_worker.kernels.aiter.triton_calls import TritonCalls
from tests.aiter import fake_rocm
from tests.aiter.checkout import CHECKOUT
from tests.aiter.compiler.launches import LAUNCHES
from tests.aiter.cross_compile import compiled_launches
from tests.aiter.example_calls import method_names
from tests.aiter.kernel_table import GFX950_KERNELS, ONLY_AT_HEAD, TRITON_KERNELS


def test_every_call_is_compiled() -> None:
    assert set(LAUNCHES) == set(TRITON_KERNELS) == method_names(TritonCalls) - ONLY_AT_HEAD


@pytest.mark.parametrize("method", LAUNCHES)
def test_kernels_compile_and_fit(method: str, arch: str, triton_calls: TritonCalls) -> None:
    names = set()
    for shape, launch in LAUNCHES[method].items():
        with compiled_launches() as compiled:
            launch(triton_calls)
        assert compiled, f"{shape}: nothing was launched"
        for kernel in compiled:
            print(f"{shape}: {kernel}")
            assert kernel.lds_bytes <= fake_rocm.LDS_BYTES[arch], f"{shape}: {kernel}"
            assert kernel.hsaco_bytes > 0
        names |= {kernel.kernel for kernel in compiled}
    if CHECKOUT is not None:
        return  # kernels are renamed, and others are split
    assert names == TRITON_KERNELS[method] | (GFX950_KERNELS.get(method, set()) if arch == "gfx950" else set())
