"""Which experts a token goes through, in plain torch; row by row, so what a token gets does not depend on the batch."""

import torch
from torch import Tensor

from model_worker.models.experts_config import ExpertsConfig


def topk_softmax(logits: Tensor, num_chosen: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """See `Kernels.topk_softmax`."""
    weights, ids = logits.float().softmax(dim=1).topk(num_chosen, dim=1)
    return ids, weights / weights.sum(dim=1, keepdim=True) if renormalize else weights


def biased_grouped_topk(logits: Tensor, bias: Tensor, experts: ExpertsConfig) -> tuple[Tensor, Tensor]:
    """See `Kernels.biased_grouped_topk`."""
    # torch's sigmoid takes another exp for the last few elements of a tensor, and which those are depends on the batch.
    scores = logits.float().neg().exp_().add_(1.0).reciprocal_()
    for_choice = scores + bias
    if experts.num_groups_chosen < experts.num_groups:
        groups = for_choice.view(len(for_choice), experts.num_groups, -1)
        group_scores = groups.topk(min(2, groups.shape[2]), dim=2).values.sum(dim=2)
        chosen = group_scores.topk(experts.num_groups_chosen, dim=1).indices
        is_out = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, chosen, False)
        for_choice = groups.masked_fill(is_out.unsqueeze(2), float("-inf")).flatten(1)
    ids = for_choice.topk(experts.num_chosen, dim=1).indices
    weights = scores.gather(1, ids)
    if experts.renormalize:
        weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)
    return ids, weights * experts.scale
