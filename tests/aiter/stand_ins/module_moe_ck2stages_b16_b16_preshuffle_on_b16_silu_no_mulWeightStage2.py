"""Both products of experts in bfloat16 over shuffled weights, sorted by `moe_sorting_fwd`; the weight of an expert comes in with the second."""

from collections.abc import Iterator

import torch
from torch import Tensor


def ck_moe_stage1(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    sorted_token_ids: Tensor,
    sorted_expert_ids: Tensor,
    num_valid_ids: Tensor,
    out: Tensor,
    topk: int,
    kernelName: str | None = None,
    w1_scale: Tensor | None = None,
    a1_scale: Tensor | None = None,
    block_m: int | None = 32,
    sorted_weights: Tensor | None = None,
    quant_type: int = 0,
    activation: int = 0,
) -> None:
    assert sorted_weights is None and block_m is not None
    weight = _unshuffled(w1)
    for _, expert, token, place in _pairs(sorted_token_ids, sorted_expert_ids, num_valid_ids, block_m):
        gate, up = (weight[expert].float() @ hidden_states[token].float()).chunk(2)
        out[token, place] = torch.nn.functional.silu(gate) * up


def ck_moe_stage2(
    inter_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    sorted_token_ids: Tensor,
    sorted_expert_ids: Tensor,
    num_valid_ids: Tensor,
    out: Tensor,
    topk: int,
    kernelName: str | None = None,
    w2_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
    block_m: int | None = 32,
    sorted_weights: Tensor | None = None,
    quant_type: int = 0,
    activation: int = 0,
) -> None:
    assert sorted_weights is not None and block_m is not None
    weight, total = _unshuffled(w2), torch.zeros(out.shape)
    for index, expert, token, place in _pairs(sorted_token_ids, sorted_expert_ids, num_valid_ids, block_m):
        total[token] += float(sorted_weights[index]) * (weight[expert].float() @ inter_states[token, place].float())
    out.copy_(total)


def _pairs(ids: Tensor, experts: Tensor, num_valid: Tensor, block: int) -> Iterator[tuple[int, int, int, int]]:
    """Index among the sorted, expert, token, place among the token's experts; without those that fill a block up."""
    for index in range(int(num_valid[0])):
        place, token = int(ids[index]) >> 24, int(ids[index]) & 0xFFFFFF
        if token < int(num_valid[1]):
            yield index, int(experts[index // block]), token, place


def _unshuffled(weight: Tensor) -> Tensor:
    """The inverse of AITER's `shuffle_weight` with its layout (16, 16)."""
    rows, columns = weight.shape[-2:]
    vector = 16 // weight.element_size()
    tiles = weight.view(-1, rows // 16, columns // 32, 32 // vector, 16, vector)
    return tiles.permute(0, 1, 4, 2, 3, 5).reshape(weight.shape)
