"""The interpreter computes what a GPU's compiler would where the patches stand: bfloat16 and 8-bit floats rounded to nearest even, dots in float32."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16


@triton.jit
def _copy(source, target, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.arange(0, COUNT)
    tl.assume(COUNT < 0)
    tl.store(target + offsets, tl.load(source + offsets).to(target.dtype.element_ty))


@triton.jit
def _product(a, b, out, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out + index, tl.dot(tl.load(a + index), tl.load(b + index)))


def copied(source: Tensor, dtype: torch.dtype) -> Tensor:
    target = torch.empty(source.shape, dtype=dtype)
    _copy[(1,)](source, target, source.numel())
    return target


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz], ids=str
)
def test_conversions_round_as_torch_does(dtype: torch.dtype) -> None:
    values = torch.randn(256, generator=torch.Generator().manual_seed(1)) * 8
    narrow = copied(values, dtype)
    assert torch.equal(narrow.float(), values.to(dtype).float())
    assert torch.equal(copied(narrow, torch.float32), narrow.float())


def test_a_product_of_bfloat16_matrices_accumulates_in_float32() -> None:
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randn(ROWS, ROWS, generator=generator).bfloat16() for _ in range(2))
    out = torch.empty(ROWS, ROWS)
    _product[(1,)](a, b, out, ROWS)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-6, atol=1e-6)
