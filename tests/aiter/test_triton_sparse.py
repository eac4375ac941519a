"""Attention over the positions that an index chooses, by AITER's real Triton kernel in the interpreter, against the torch backend in float32. What
others left in a block is large."""

import pytest
import torch
from torch import Tensor

from model_worker.kernels.aiter import triton_sparse
from model_worker.kernels.aiter.library import AiterLibrary
from model_worker.kernels.aiter.triton_backend import AiterTritonKernels
from model_worker.kernels.interface import IndexQueries, Kernels
from model_worker.kernels.torch_backend import TorchKernels
from model_worker.kv_shape import KVShape
from model_worker.placement import Placement
from tests.aiter.test_triton_attention import BOUND, ROWS, step, tensors

RANK, KEPT, INDEX_DIM, INDEX_HEADS = 32, 48, 16, 2


@pytest.fixture
def ours(arch: str) -> AiterTritonKernels:
    return AiterTritonKernels(AiterLibrary(arch), Placement(torch.device("cpu"), torch.bfloat16))


def attend(kernels: Kernels, rows: tuple[list[int], list[int]], num_heads: int, num_chosen: int) -> Tensor:
    """Float32. Which positions are chosen is the same in any precision: scores are products of small whole numbers."""
    made = step(kernels, KVShape(1, 1, KEPT + INDEX_DIM, num_planes=1), rows)
    tokens, dtype = made.batch.num_tokens, kernels.placement.dtype
    made.pool.keys(0).view(-1, KEPT + INDEX_DIM)[:, KEPT:].round_()
    made.new[0][..., KEPT:].round_()
    index_query, weights = (
        tensors(*shape).round().to(dtype) for shape in ((tokens, INDEX_HEADS, INDEX_DIM), (tokens, INDEX_HEADS))
    )
    attention = kernels.sparse_attention(made.batch, made.pool)
    attention.store(0, made.new[0], made.new[0])
    query = tensors(tokens, num_heads, KEPT).to(dtype)
    return attention.attend_chosen(0, query, IndexQueries(index_query, weights, num_chosen), RANK).float()


@pytest.mark.parametrize("num_chosen", [6, 64])
@pytest.mark.parametrize("num_heads", [4, 32])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_attention_over_chosen_positions(
    ours: AiterTritonKernels, rows: tuple[list[int], list[int]], num_heads: int, num_chosen: int
) -> None:
    """Fewer heads than AITER has programs for, or more; contexts longer than what is chosen, or shorter."""
    expected, found = (attend(kernels, rows, num_heads, num_chosen) for kernels in (TorchKernels(), ours))
    assert found.shape == expected.shape and float((found - expected).abs().max()) < BOUND


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_any_number_of_queries_may_choose_at_once(
    ours: AiterTritonKernels, monkeypatch: pytest.MonkeyPatch, rows: tuple[list[int], list[int]]
) -> None:
    whole = attend(ours, rows, 4, 6)
    monkeypatch.setattr(triton_sparse, "SCORES_MAX", 1)
    assert torch.equal(attend(ours, rows, 4, 6), whole)


def test_of_equal_scores_the_first_are_best() -> None:
    scores = torch.tensor([[0.0, -1.0, -0.0, 2.0, 0.0, 2.0], [-1.0, -2.0, -1.0, float("-inf"), -3.0, -2.0]])
    assert triton_sparse._best(scores, 4).tolist() == [[3, 5, 0, 2], [0, 2, 1, 5]]
