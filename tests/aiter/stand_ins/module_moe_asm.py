"""Routing: which experts a token goes through."""

import torch
from torch import Tensor


def topk_softmax(
    topk_weights: Tensor, topk_indices: Tensor, token_expert_indices: Tensor, gating_output: Tensor, need_renorm: bool
) -> None:
    assert topk_weights.dtype == torch.float32 and topk_indices.dtype == token_expert_indices.dtype == torch.int32
    weights, ids = gating_output.float().softmax(-1).topk(topk_indices.shape[1], dim=-1)
    topk_indices.copy_(ids)
    topk_weights.copy_(weights / weights.sum(-1, keepdim=True) if need_renorm else weights)


def biased_grouped_topk(
    gating_output: Tensor,
    correction_bias: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    num_expert_group: int,
    topk_grp: int,
    need_renorm: bool,
    routed_scaling_factor: float = 1.0,
) -> None:
    assert gating_output.dtype == correction_bias.dtype and num_expert_group in (1, 2, 4, 8)
    assert topk_weights.dtype == torch.float32 and topk_ids.dtype == torch.int32
    scores = gating_output.float().sigmoid()
    groups = (scores + correction_bias.float()).view(len(scores), num_expert_group, -1)
    best_groups = groups.topk(2, dim=-1).values.sum(-1).topk(topk_grp, dim=-1).indices
    is_out = torch.ones(groups.shape[:2], dtype=torch.bool).scatter_(1, best_groups, False)
    ids = groups.masked_fill(is_out.unsqueeze(2), float("-inf")).flatten(1).topk(topk_ids.shape[1], dim=-1).indices
    weights = scores.gather(1, ids)
    topk_ids.copy_(ids)
    topk_weights.copy_((weights / weights.sum(-1, keepdim=True) if need_renorm else weights) * routed_scaling_factor)
