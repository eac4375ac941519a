"""Attention of rows of different lengths, in assembly: heads of 128 elements in bfloat16."""

import torch
from torch import Tensor


def fmha_v3_varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    min_seqlen_q: int,
    dropout_p: float,
    softmax_scale: float,
    logits_soft_cap: float,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    return_softmax_lse: bool,
    return_dropout_randval: bool,
    how_v3_bf16_cvt: int,
    out: Tensor | None = None,
    block_table: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    gen: torch.Generator | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Causal, aligned at the bottom right."""
    assert is_causal and window_size_left == -1 and not logits_soft_cap and block_table is None and cu_seqlens_k is not None
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    starts, context_starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert max_seqlen_q >= max(cu_seqlens_q.diff().tolist()) and max_seqlen_k >= max(cu_seqlens_k.diff().tolist())
    assert starts[-1] == len(q) and context_starts[-1] == len(k) == len(v)
    output = torch.empty_like(q)
    shared = q.shape[1] // k.shape[1]
    for row in range(len(starts) - 1):
        queries = slice(starts[row], starts[row + 1])
        context = slice(context_starts[row], context_starts[row + 1])
        count, length = queries.stop - queries.start, context.stop - context.start
        keys, values = (each[context].float().repeat_interleave(shared, 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[queries].float(), keys) * softmax_scale
        visible = torch.ones(count, length, dtype=torch.bool).tril(length - count)
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        output[queries] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    empty = torch.empty(0)
    return output, empty, empty.clone(), torch.empty(2, dtype=torch.int64)
