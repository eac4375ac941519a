"""Paged attention in assembly, with the limits of its table of kernels."""

import torch
from torch import Tensor


def pa_fwd_asm(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    block_tables_stride0: int,
    max_qlen: int = 1,
    K_QScale: Tensor | None = None,
    V_QScale: Tensor | None = None,
    out_: Tensor | None = None,
    qo_indptr: Tensor | None = None,
    high_precision: int | None = 1,
    kernelName: str | None = None,
) -> Tensor:
    """One query per row of `Q` [rows, heads, 128]; keys [blocks, kv_heads, 128 / x, 16, x], values [blocks, kv_heads, 16 / x, 128, x]; of 8-bit
    ones, scales [blocks, kv_heads, 16]."""
    blocks, kv_heads, _, block_size, x = K.shape
    shared, head_dim = Q.shape[1] // kv_heads, Q.shape[2]
    assert Q.dtype == torch.bfloat16 and head_dim == 128 and block_size == 16 and shared <= 16 and max_qlen == 1
    assert V.shape == (blocks, kv_heads, block_size // x, head_dim, x) and K.stride()[:2] == V.stride()[:2]
    assert block_tables.dtype == context_lens.dtype == torch.int32 and block_tables_stride0 == block_tables.stride(0)
    assert Q.stride(1) == head_dim and (K_QScale is not None) == (K.dtype.itemsize == 1)
    output = torch.empty_like(Q)
    for row, length in enumerate(context_lens.tolist()):
        table = block_tables[row, : -(-length // block_size)].long()
        keys = K[table].float().permute(0, 3, 1, 2, 4).reshape(-1, kv_heads, head_dim)[:length]
        values = V[table].float().permute(0, 2, 4, 1, 3).reshape(-1, kv_heads, head_dim)[:length]
        if K_QScale is not None and V_QScale is not None:
            keys, values = keys * _by_token(K_QScale, table)[:length], values * _by_token(V_QScale, table)[:length]
        query = Q[row].float().view(kv_heads, shared, head_dim)
        weights = (torch.einsum("ksd,tkd->kst", query, keys) / head_dim**0.5).softmax(-1)
        output[row] = torch.einsum("kst,tkd->ksd", weights, values).reshape(-1, head_dim).to(Q.dtype)
    return output


def _by_token(scales: Tensor, table: Tensor) -> Tensor:
    return scales[table].transpose(1, 2).reshape(-1, scales.shape[1], 1)
