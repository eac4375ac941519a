"""Sorts the pairs of a token and one of its experts by expert, in blocks of one expert each."""

import torch
from torch import Tensor


def moe_sorting_fwd(
    topk_ids: Tensor,
    topk_weights: Tensor,
    sorted_token_ids: Tensor,
    sorted_weights: Tensor,
    sorted_expert_ids: Tensor,
    num_valid_ids: Tensor,
    moe_buf: Tensor,
    num_experts: int,
    unit_size: int,
    local_expert_mask: Tensor | None = None,
    num_local_tokens: Tensor | None = None,
    dispatch_policy: int = 0,
) -> None:
    """A pair is `place among the token's experts << 24 | token`; what fills a block up has a token behind the last. Experts are counted among those
    whose mask is 1."""
    assert topk_ids.dtype == torch.int32 and topk_weights.dtype == torch.float32
    mask = [1] * num_experts if local_expert_mask is None else local_expert_mask.tolist()
    assert len(mask) == num_experts and (local_expert_mask is None or local_expert_mask.dtype == torch.int32)
    assert int(topk_ids.min()) >= 0 and int(topk_ids.max()) < num_experts
    tokens, count = topk_ids.shape
    pairs: list[int] = []
    weights: list[float] = []
    experts: list[int] = []
    for expert in range(num_experts):
        if not mask[expert]:
            continue
        found = (topk_ids == expert).nonzero().tolist()
        fill = -len(found) % unit_size
        pairs += [place << 24 | token for token, place in found] + [count << 24 | tokens] * fill
        weights += [float(topk_weights[token, place]) for token, place in found] + [0.0] * fill
        experts += [sum(mask[:expert])] * ((len(found) + fill) // unit_size)
    sorted_token_ids[: len(pairs)] = torch.tensor(pairs, dtype=torch.int32)
    sorted_weights[: len(weights)] = torch.tensor(weights)
    sorted_expert_ids[: len(experts)] = torch.tensor(experts, dtype=torch.int32)
    num_valid_ids.copy_(torch.tensor([len(pairs), tokens]))
    moe_buf.zero_()
