"""Weights in fewer bits: which are kept so, and that not one bit of a product tells the difference."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from model_worker.kernels.cpu.library import KIND, CpuLibrary, MatrixView, WeightView, cpu_library
from model_worker.kernels.cpu.packed_weight import PackedWeight

DTYPES = (torch.float32, torch.bfloat16)
ROWS = (1, 2, 7, 12, 13, 25, 49, 300)
"""One tile; some by blocks; many at once."""


class PlainLibrary(CpuLibrary):
    """Another library as seen by one to whom every weight is plain."""

    def __init__(self, library: CpuLibrary) -> None:
        self.__dict__ |= library.__dict__

    def pack(self, matrix: MatrixView, to: WeightView) -> bool:
        return to.kind in KIND.values() and super().pack(matrix, to)


@pytest.fixture(scope="module", params=[1, 3], ids="threads{}".format)
def library(request: pytest.FixtureRequest) -> CpuLibrary:
    return cpu_library(request.param)


def pair(library: CpuLibrary, weight: Tensor, dtype: torch.dtype) -> tuple[PackedWeight, PackedWeight]:
    """As it is kept, and plain."""
    return PackedWeight(library, weight, dtype), PackedWeight(PlainLibrary(library), weight, dtype)


def normal(*shape: int) -> Tensor:
    return 0.02 * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def without_low_bytes(weight: Tensor, count: int) -> Tensor:
    return (weight.view(torch.int32) & -(1 << 8 * count)).view(torch.float32)


def bits_of(weight: PackedWeight) -> float:
    """Of each number."""
    return 8 * weight.nbytes / (1024 * 96)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize(
    ("dtype", "zero_bytes", "bits"),
    [(torch.bfloat16, 0, 12.5), (torch.float32, 2, 12.5), (torch.float32, 1, 20.5), (torch.float32, 0, 32.0)],
)
def test_numbers_of_similar_size_take_fewer_bits(library: CpuLibrary, dtype: torch.dtype, zero_bytes: int, bits: float) -> None:
    compact, plain = pair(library, without_low_bytes(normal(1024, 96), zero_bytes), dtype)
    assert bits_of(compact) == bits and bits_of(plain) == 8 * dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_no_other_kind_has_a_smaller_one(library: CpuLibrary, dtype: torch.dtype) -> None:
    compact, plain = pair(library, torch.zeros(64, 64), dtype)
    assert compact.nbytes == plain.nbytes


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (33, 7), (199, 64), (960, 576), (576, 1536)])
@pytest.mark.parametrize(("dtype", "zero_bytes"), [(torch.bfloat16, 0), (torch.float32, 2), (torch.float32, 1)])
def test_products_have_the_same_bits(
    library: CpuLibrary, outputs: int, inputs: int, dtype: torch.dtype, zero_bytes: int
) -> None:
    compact, plain = pair(library, without_low_bytes(normal(outputs, inputs), zero_bytes), dtype)
    assert compact.nbytes < plain.nbytes
    for rows in ROWS:
        x = normal(rows, inputs)
        assert same(compact(x, None), plain(x, None)), rows


WIDE = [2.0**exponent for exponent in range(-60, 60, 2)]
"""Each of another top byte."""


def scattered(strangers: int) -> Tensor:
    """[32, 64]: ones, and this many numbers of sizes that occur once in each line; the first and last number of a line are among them."""
    weight = torch.ones(32, 64)
    for line in range(2):
        places = [(0, 0), (31, 31), (0, 31), (31, 0), *((column, (5 * column) % 32) for column in range(1, 31))]
        for (column, k), value in zip(places, WIDE[:strangers], strict=False):
            weight[column, 32 * line + k] = -value if column % 2 else value
    return weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strangers", range(0, 31, 3))
def test_numbers_of_other_sizes_are_patched_while_they_are_few(library: CpuLibrary, dtype: torch.dtype, strangers: int) -> None:
    compact, plain = pair(library, scattered(strangers), dtype)
    assert same(compact.rows(torch.arange(32)), scattered(strangers))
    x = normal(13, 64)
    assert same(compact(x, None), plain(x, None))
    assert strangers > 9 or compact.nbytes < plain.nbytes
    assert strangers < 27 or compact.nbytes == plain.nbytes


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_line_of_many_sizes_keeps_all_of_them_plain(library: CpuLibrary, dtype: torch.dtype) -> None:
    weight = torch.ones(96, 96)
    weight[40, 64:96] = torch.tensor(WIDE[:32])
    compact, plain = pair(library, weight, dtype)
    assert compact.nbytes == plain.nbytes


ODD = (0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, -3e38, 1.0, -1.0078125, 2.0**-126)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_infinities_and_what_is_no_number_come_back(library: CpuLibrary, dtype: torch.dtype) -> None:
    values = torch.tensor([value for value, _ in zip(itertools.cycle(ODD), range(32 * 32), strict=False)])
    weight = values.bfloat16().float().view(32, 32)
    compact, plain = pair(library, weight, dtype)
    assert compact.nbytes < plain.nbytes
    assert same(compact.rows(torch.arange(32)), plain.rows(torch.arange(32)))


@given(
    numbers=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40),
    kept=st.sampled_from([0xFFFFFFFF, 0xFFFFFF00, 0xFFFF0000]),
    shape=st.tuples(st.integers(1, 70), st.integers(1, 70)),
)
def test_any_bits_come_back(numbers: list[int], kept: int, shape: tuple[int, int]) -> None:
    library, count = cpu_library(1), shape[0] * shape[1]
    bits = torch.tensor(numbers)[torch.arange(count) * 7 % len(numbers)] & kept
    weight = bits.to(torch.int32).view(torch.float32).view(*shape)
    compact, plain = pair(library, weight, torch.float32)
    assert same(compact.rows(torch.arange(shape[0])), weight) and compact.nbytes <= plain.nbytes
    compact, plain = pair(library, weight, torch.bfloat16)
    assert same(compact.rows(torch.arange(shape[0])), plain.rows(torch.arange(shape[0])))
