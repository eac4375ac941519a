"""Products in 8 bits: quantized as they say, exact from there on, each row by itself."""

import pytest
import torch
from torch import Tensor

from model_worker.kernels.cpu.backend import CpuKernels
from model_worker.kernels.cpu.library import CpuLibrary, cpu_library
from tests.model_worker.test_cpu_kernels import numbers

GROUP = 32


@pytest.fixture(scope="module", params=[1, 3])
def library(request: pytest.FixtureRequest) -> CpuLibrary:
    return cpu_library(request.param)


@pytest.fixture
def kernels(library: CpuLibrary) -> CpuKernels:
    return CpuKernels(library, torch.float16, in_8_bits=True)


def quantized(x: Tensor, scales: torch.dtype = torch.float32) -> Tensor:
    """`x` `[n, in]` in float64 after the quantization of each 32 numbers of a row, with scales of this kind."""
    padded = torch.nn.functional.pad(x.double(), (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    scale = (padded.abs().amax(2, keepdim=True) / 127).to(scales).double()
    return torch.where(scale > 0, (padded / scale).round().clamp(-127, 127) * scale, 0.0).flatten(1)[:, : x.shape[1]]


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (32, 33), (70, 199), (576, 960), (1536, 64)])
@pytest.mark.parametrize("rows", [1, 2, 6, 7, 31, 90])
def test_a_product_is_that_of_the_quantized_numbers_and_of_each_row_alone(
    kernels: CpuKernels, inputs: int, outputs: int, rows: int
) -> None:
    weight, x, bias = numbers(outputs, inputs, scale=inputs**-0.5), numbers(rows, inputs), numbers(outputs)
    product = kernels.pack(weight)
    assert product is not None
    found = product(x, bias)
    expected = quantized(x) @ quantized(weight, torch.float16).T + bias.double()
    # A number in the middle between two steps may be rounded either way, so here and there a product is off by a step.
    assert (found - expected).abs().max() < 2e-2
    assert (found - expected).abs().mean() < 2e-4
    assert torch.equal(found, torch.cat([product(x[row : row + 1], bias) for row in range(rows)]))


def test_rows_of_a_table(kernels: CpuKernels) -> None:
    weight, ids = numbers(199, 70), torch.tensor([0, 198, 31, 32])
    assert (kernels.pack_table(weight).rows(ids) - quantized(weight, torch.float16)[ids]).abs().max() < 1e-6


def test_groups_of_zeros_and_of_what_is_no_number(kernels: CpuKernels) -> None:
    product = kernels.pack(torch.ones(40, 64))
    assert product is not None
    x = torch.zeros(3, 64)
    x[1, 3], x[2, 40] = float("nan"), float("inf")
    found = product(x, None)
    assert not found[0].any() and not found[1:].isfinite().any()
    assert not product(torch.full((1, 64), 1e-44), None).isnan().any()
