"""AITER's Triton products with each token's own experts, in the interpreter, against float32."""

import pytest
import torch

from model_worker.kernels.aiter.triton_calls import TritonCalls
from tests.aiter.references import error, normal

EXPERTS_ERROR_MAX = 0.02
"""Results are normal with deviation 1: `product_error_max` of `test_triton_call_gemm` for 128 elements."""

EXPERTS, CHOSEN, SIZE, ROWS, BLOCK_SIZE = 6, 2, 128, 64, 16


def chosen_experts(tokens: int, *, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(EXPERTS, generator=generator)[:CHOSEN] for _ in range(tokens)]).int()


@pytest.mark.parametrize("tokens", [1, 20])
def test_pairs_are_sorted_by_expert_and_padded(tokens: int, triton_calls: TritonCalls) -> None:
    ids = chosen_experts(tokens, seed=1)
    found = triton_calls.sort_tokens(ids, EXPERTS, BLOCK_SIZE)
    blocks = int(found.count) // BLOCK_SIZE
    assert int(found.count) % BLOCK_SIZE == 0
    seen = []
    for block in range(blocks):
        for pair in found.pairs[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE].tolist():
            if pair < ids.numel():
                assert ids.flatten()[pair] == found.experts[block]
                seen.append(pair)
    assert sorted(seen) == list(range(ids.numel()))
    assert found.experts[:blocks].tolist() == sorted(found.experts[:blocks].tolist())


@pytest.mark.parametrize(("tokens", "is_weighted", "is_by_pair"), [(1, True, False), (6, False, False), (6, True, True)])
def test_product_with_the_chosen_experts(tokens: int, is_weighted: bool, is_by_pair: bool, triton_calls: TritonCalls) -> None:
    ids = chosen_experts(tokens, seed=2)
    x = normal(tokens * CHOSEN if is_by_pair else tokens, SIZE, seed=3)
    weight = normal(EXPERTS, ROWS, SIZE, seed=4, scale=0.1)
    weights = torch.rand(tokens, CHOSEN, generator=torch.Generator().manual_seed(5)) if is_weighted else None
    found = triton_calls.gemm_experts(x, weight, triton_calls.sort_tokens(ids, EXPERTS, BLOCK_SIZE), ids, weights)
    by_pair = x.float() if is_by_pair else x.float().repeat_interleave(CHOSEN, 0)
    expected = torch.einsum("pk,pnk->pn", by_pair, weight.float()[ids.flatten().long()]).view(tokens, CHOSEN, ROWS)
    if weights is not None:
        expected = expected * weights[..., None]
    assert error(found, expected) < EXPERTS_ERROR_MAX


def test_experts_that_are_elsewhere_give_zeros(triton_calls: TritonCalls) -> None:
    ids = torch.tensor([[0, 7], [-1, 3], [5, 6]], dtype=torch.int32)
    x, weight = normal(3, SIZE, seed=3), normal(EXPERTS, ROWS, SIZE, seed=4, scale=0.1)
    found = triton_calls.gemm_experts(x, weight, triton_calls.sort_tokens(ids, EXPERTS, BLOCK_SIZE), ids, None)
    is_here = (ids >= 0) & (ids < EXPERTS)
    assert not found[~is_here].any()
    expected = torch.einsum("tk,tcnk->tcn", x.float(), weight.float()[ids.clamp(0, EXPERTS - 1).long()])
    assert error(found[is_here], expected[is_here]) < EXPERTS_ERROR_MAX
