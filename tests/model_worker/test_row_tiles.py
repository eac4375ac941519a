"""Tiles of a product: every row has its own bits, wherever it lies and whatever lies beside it."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import linear, silu

from model_worker.kernels import row_tiles
from model_worker.kernels.invariant_backend import InvariantKernels
from model_worker.kernels.row_tiles import CANDIDATES, NotInvariant, find_row_tiles

KERNELS = InvariantKernels()
SHAPES = [(960, 576), (576, 1536), (199, 64), (70, 24), (257, 2048), (3, 7)]


def random_weight(shape: tuple[int, int], transposed: bool) -> torch.Tensor:
    weight = torch.empty(shape).normal_(generator=torch.Generator().manual_seed(5))
    return weight.t().contiguous().t() if transposed else weight


@pytest.fixture(scope="module", params=SHAPES, ids="{0[0]}x{0[1]}".format)
def shape(request: pytest.FixtureRequest) -> tuple[int, int]:
    return request.param


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 300),
    first=st.integers(0, 300),
    transposed=st.booleans(),
    neighbours=st.sampled_from([0.0, 3e38, float("nan")]),
)
def test_a_row_has_the_bits_that_it_has_alone(
    shape: tuple[int, int], rows: int, first: int, transposed: bool, neighbours: float
) -> None:
    weight = random_weight(shape, transposed)
    x = torch.empty(rows, shape[1]).normal_(generator=torch.Generator().manual_seed(rows))
    together = KERNELS.linear(x, weight, None)
    row = first % rows
    assert torch.equal(KERNELS.linear(x[row : row + 1], weight, None), together[row : row + 1])
    others = torch.full_like(x, neighbours)
    others[row] = x[row]
    assert torch.equal(KERNELS.linear(others, weight, None)[row], together[row])
    assert torch.allclose(together, linear(x, weight), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("threads", [2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_more_threads_give_the_same_bits(shape: tuple[int, int], transposed: bool, threads: int) -> None:
    weight = random_weight(shape, transposed)
    x = torch.empty(200, shape[1]).normal_(generator=torch.Generator().manual_seed(1))
    counts = (1, 5, 16, 40, 200)
    expected = [KERNELS.linear(x[:count], weight, None) for count in counts]
    torch.set_num_threads(threads)
    try:
        results = [KERNELS.linear(x[:count], weight, None) for count in counts]
    finally:
        torch.set_num_threads(1)
    assert all(map(torch.equal, results, expected))


def test_a_bias_is_added_to_every_row() -> None:
    weight, bias = random_weight((70, 24), True), torch.arange(70.0)
    x = torch.randn(9, 24, generator=torch.Generator().manual_seed(1))
    assert torch.equal(KERNELS.linear(x, weight, bias), KERNELS.linear(x, weight, None) + bias)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(rows=st.integers(1, 300), size=st.sampled_from([96, 100, 1536]))
def test_silu_of_an_element_has_the_bits_that_it_has_alone(rows: int, size: int) -> None:
    x = torch.empty(rows, 2 * size).normal_(0.0, 4.0, generator=torch.Generator().manual_seed(rows))
    together = KERNELS.silu_and_mul(x)
    for column in (0, size // 2, size - 1):
        alone = KERNELS.silu_and_mul(x[-1:, [column, size + column]])
        assert torch.equal(alone[0], together[-1, column : column + 1])
    assert torch.allclose(together, silu(x[:, :size]) * x[:, size:], rtol=1e-5, atol=1e-6)


def test_silu_far_from_zero() -> None:
    gate = torch.tensor([[-1e30, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30]])
    result = KERNELS.silu_and_mul(torch.cat((gate, torch.ones_like(gate)), dim=1))
    assert torch.allclose(result, silu(gate), rtol=1e-5, atol=1e-30) and torch.isfinite(result).all()


@given(rows=st.integers(1, 2000))
def test_tiles_cover_all_rows_with_sizes_that_fit(rows: int) -> None:
    tiles = find_row_tiles(torch.empty(8, 8))
    cover = tiles.cover(rows)
    assert set(cover) <= set(tiles.sizes) <= set(CANDIDATES)
    assert rows <= sum(cover) < rows + max(16, rows), "little is padding"


def spoil(monkeypatch: pytest.MonkeyPatch, factors: Callable[[int], torch.Tensor | float]) -> None:
    """Let a product of n rows be `factors(n)` times what it is."""
    plain = row_tiles.product

    def spoilt(x: torch.Tensor, weight: torch.Tensor, result: torch.Tensor) -> None:
        plain(x, weight, result)
        result.mul_(factors(len(x)))

    monkeypatch.setattr(row_tiles, "product", spoilt)


def test_a_product_that_depends_on_the_place_of_a_row_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, lambda rows: torch.linspace(1.0, 1.1, rows).unsqueeze(1))
    with pytest.raises(NotInvariant, match=r"a product with a 70x24 weight .* MKL_CBWR=AUTO,STRICT"):
        find_row_tiles(torch.empty(70, 24))


def test_numbers_of_rows_with_other_bits_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, lambda rows: 1.0 if rows in (16, 48) else 1.001)
    tiles = find_row_tiles(torch.empty(70, 24))
    assert tiles.sizes == (16, 48)
    assert [tiles.cover(rows) for rows in (1, 16, 17, 40, 50)] == [[16], [16], [16, 16], [48], [48, 16]]


def test_a_shape_that_only_one_thread_can_do_is_done_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, lambda rows: float(torch.get_num_threads()))
    torch.set_num_threads(2)
    try:
        tiles = find_row_tiles(torch.empty(70, 24))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert tiles.one_thread and 16 in tiles.sizes


def test_large_weights_are_tried_with_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_tiles, "TRIAL_MAX", 70 * 24 * 40)
    assert max(find_row_tiles(torch.empty(70, 24)).sizes) == 32
