"""Latent attention in assembly: the first stage, which leaves parts of the context for AITER's own Triton kernel to merge."""

import torch
from torch import Tensor


def mla_decode_stage1_asm_fwd(
    Q: Tensor,
    KV: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_page_indices: Tensor,
    kv_last_page_lens: Tensor,
    num_kv_splits_indptr: Tensor | None,
    work_metadata: Tensor | None,
    work_indptr: Tensor | None,
    work_info_set: Tensor | None,
    max_seqlen_q: int,
    softmax_scale: float,
    splitData: Tensor,
    splitLse: Tensor,
    output: Tensor,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
) -> None:
    """Every part gets the attention over the whole context, with the same weight: merged, that is the same."""
    assert num_kv_splits_indptr is not None and work_metadata is None and max_seqlen_q == 1 and Q.shape[1] == 16
    assert (qo_indptr.diff() == 1).all()
    whole = _attended(Q, KV, qo_indptr, kv_indptr, kv_page_indices, kv_last_page_lens, softmax_scale)
    splitData.copy_(whole.unsqueeze(1).expand_as(splitData))
    splitLse.zero_()


def mla_prefill_asm_fwd(
    Q: Tensor,
    KV: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_page_indices: Tensor,
    kv_last_page_lens: Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    splitData: Tensor,
    splitLse: Tensor,
) -> None:
    """Causal, aligned at the bottom right."""
    assert max_seqlen_q >= int(qo_indptr.diff().max())
    whole = _attended(Q, KV, qo_indptr, kv_indptr, kv_page_indices, kv_last_page_lens, softmax_scale)
    splitData.copy_(whole.unsqueeze(1))
    splitLse.zero_()


def _attended(
    query: Tensor, vectors: Tensor, starts: Tensor, indptr: Tensor, indices: Tensor, last_page: Tensor, scale: float
) -> Tensor:
    """`query` [T, heads, 576] over pages of one vector; float32 [T, heads, 512]."""
    assert query.is_contiguous() and query.dtype == vectors.dtype == torch.bfloat16 and query.shape[1] in (16, 128)
    assert vectors.shape[1:] == (1, 1, 576) and vectors.is_contiguous() and (last_page == 1).all()
    assert all(each.dtype == torch.int32 for each in (starts, indptr, indices, last_page))
    output = query.new_empty(*query.shape[:2], 512, dtype=torch.float32)
    for row in range(len(starts) - 1):
        queries = slice(int(starts[row]), int(starts[row + 1]))
        slots = indices[int(indptr[row]) : int(indptr[row + 1])].long()
        count, context = queries.stop - queries.start, vectors[slots, 0, 0].float()
        scores = torch.einsum("qhd,kd->hqk", query[queries].float(), context) * scale
        visible = torch.ones(count, len(slots), dtype=torch.bool).tril(len(slots) - count)
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        output[queries] = torch.einsum("hqk,kd->qhd", weights, context[:, :512])
    return output
