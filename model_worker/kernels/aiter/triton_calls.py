"""AITER's Triton kernels, one method each: tensors in, tensors out, nothing of a model.

T is a number of tokens, R of rows (sequences), H of query heads, KH of KV heads, D the size of a head. "16 bits" is bfloat16 or float16, the same
for all of a call's tensors that have it. Tensors lie on the GPU; none is changed but where it is said.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from model_worker.kernels.aiter.library import AiterFunction, AiterLibrary

NEOX = 0
"""AITER's `rotate_style` that pairs element i with element i + D / 2."""

_MLA_STAGES: dict[str, dict[str, int]] = {
    "fwd_grouped_kernel_stage1_rope": {"BLOCK_N": 32, "BLOCK_H": 16, "num_stages": 1, "waves_per_eu": 1},
    "fwd_kernel_stage2": {"num_stages": 2, "waves_per_eu": 4},
}
"""AITER's own tile sizes, which it keeps in a file for two architectures only."""


@dataclass(frozen=True, slots=True, eq=False)
class PagedRows:
    """Whose context attention reads. `cu_seqlens_q` int32 `[R + 1]`: a row's first query; `context_lens` int32 `[R]`; `block_tables` int32
    `[R, max_blocks]`; the longest of each, known to the host."""

    cu_seqlens_q: Tensor
    context_lens: Tensor
    block_tables: Tensor
    queries_max: int
    context_max: int


@dataclass(frozen=True, slots=True, eq=False)
class SortedTokens:
    """The pairs of token and chosen expert, sorted by expert, each expert's padded to whole blocks of `block_size`: `pairs` int32 indexes
    `[T, num_chosen]`, numbers beyond are padding; `experts` int32 says each block's expert, -1 one that is not here; `count` int32 `[1]`."""

    pairs: Tensor
    experts: Tensor
    count: Tensor
    block_size: int


class TritonCalls:
    """See above. A method raises AiterUnavailable where this AITER has no such kernel, and AITER's own AssertionError for a wrong shape."""

    def __init__(self, library: AiterLibrary) -> None:
        self.library = library

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x / sqrt(mean(x ** 2) + eps) * weight`: x 16 bits `[T, N]`, weight `[N]`."""
        normed: Tensor = self._function("rmsnorm", "rms_norm")(input=x, weight=weight, epsilon=eps)
        return normed

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`rms_norm` of x + residual, and that sum; 16 bits `[T, N]` each."""
        normed, total = torch.empty_like(x), torch.empty_like(x)
        function = self._function("rmsnorm", "rmsnorm2d_fwd_with_add")
        function(out=normed, input=x, residual_in=residual, residual_out=total, weight=weight, epsilon=eps)
        return normed, total

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """`(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`: x 16 bits `[T, N]`, weight and bias `[N]`."""
        normed: Tensor = self._function("norm", "layer_norm")(input=x, weight=weight, bias=bias, eps=eps)
        return normed

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x 16 bits `[T, heads, D]` with the first n elements of each head rotated (NeoX); cos and sin `[T, n / 2]`."""
        function = self._function(self._rope_module, "rope_cached_fwd")
        rotated: Tensor = function(
            x=x.unsqueeze(1),
            cos=cos.unsqueeze(1).unsqueeze(1),
            sin=sin.unsqueeze(1).unsqueeze(1),
            rotate_style=NEOX,
            reuse_freqs_front_part=True,
            nope_first=False,
        )
        return rotated.squeeze(1)

    def rotate_and_cache(
        self, qkv: tuple[Tensor, Tensor, Tensor], cache: "KVCache", slots: Tensor, rotation: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Query `[T, H, D]` and key `[T, KH, D]` rotated (NeoX), both contiguous; key and value `[T, KH, D]` are written to the cache at `slots` int64
        `[T]` (-1: nowhere, and the key returned is undefined). `rotation`: cos and sin `[T, D / 2]` of each token. D and the cache's block size are powers of two."""
        query, key, value = qkv
        cos, sin = rotation
        function = self._function("fused_kv_cache", "fused_qk_rope_reshape_and_cache")
        rotated = function(
            q=query,
            k=key,
            v=value,
            key_cache=cache.keys,
            value_cache=cache.values,
            slot_mapping=slots,
            pos=torch.arange(len(slots), device=slots.device),
            cos=cos,
            sin=sin,
            k_scale=cache.key_scale,
            v_scale=cache.value_scale,
            is_neox=True,
            flash_layout=True,
            apply_scale=cache.is_scaled,
            output_zeros=False,
        )
        return rotated[0], rotated[1]

    def attention(
        self, query: Tensor, cache: "KVCache", rows: PagedRows, scale: float, window: int | None, sinks: Tensor | None
    ) -> Tensor:
        """Causal attention of 16 bits `[T, H, D]` over each row's context in the cache, `[T, H, D]`. A query sees itself and the `window - 1`
        positions before it. `sinks` `[H]`: exp of each is one more term in the softmax's denominator."""
        output = torch.empty_like(query)
        self._function("unified_attention", "unified_attention")(
            q=query,
            k=cache.keys,
            v=cache.values,
            out=output,
            cu_seqlens_q=rows.cu_seqlens_q,
            max_seqlen_q=rows.queries_max,
            seqused_k=rows.context_lens,
            max_seqlen_k=rows.context_max,
            softmax_scale=scale,
            causal=True,
            window_size=(-1 if window is None else window - 1, 0),
            block_table=rows.block_tables,
            softcap=0.0,
            q_descale=None,
            k_descale=cache.key_scale,
            v_descale=cache.value_scale,
            sinks=sinks,
        )
        return output

    def latent_attention(
        self, query: Tensor, latents: Tensor, rank: int, context: tuple[Tensor, Tensor], scale: float, num_splits: int
    ) -> Tensor:
        """Attention of each query of 16 bits `[T, H, N]` over vectors of `latents` 16 bits `[slots, 1, N]`, which are the keys, their first `rank`
        elements the values; `[T, H, rank]`. `context`: where each query's context begins, int32 `[T + 1]`, in a list of slots int32. It is
        worked on in `num_splits` parts at once."""
        starts, slots = context
        tokens, heads, size = query.shape
        output = query.new_empty(tokens, heads, rank)
        self._function("mla_decode_rope", "decode_attention_fwd_grouped_rope")(
            q=query,
            k_buffer=latents,
            v_buffer=latents[..., :rank],
            o=output,
            kv_indptr=starts,
            kv_indices=slots,
            k_pe_tokens=None,
            kv_lora_rank=rank,
            rotary_dim=size - rank,
            cos_sin_cache=None,
            positions=None,
            attn_logits=query.new_empty(tokens, heads, num_splits, rank + 1, dtype=torch.float32),
            num_kv_splits=num_splits,
            sm_scale=scale,
            logit_cap=0.0,
            use_rope=False,
            is_neox_style=True,
            config={stage: dict(sizes) for stage, sizes in _MLA_STAGES.items()},  # it writes to them
        )
        return output

    def chosen_latent_attention(
        self, query: Tensor, latents: Tensor, rank: int, chosen: Tensor, rows: PagedRows, scale: float
    ) -> Tensor:
        """As `latent_attention`, of each query over the slots `chosen` int32 `[T, n]`, -1 being none. `latents` 16 bits `[blocks, block_size, 1, N]`; H
        is a multiple of 16; `rank`, N - rank and the block size are powers of two, 16 or more."""
        assert query.shape[1] % 16 == 0, "AITER launches no program for the heads behind the last 16"
        output = query.new_empty(*query.shape[:2], rank)
        self._function("unified_attention_sparse_mla", "unified_attention_sparse_mla")(
            q=query,
            kv=latents,
            out=output,
            cu_seqlens_q=rows.cu_seqlens_q,
            max_seqlen_q=rows.queries_max,
            seqused_k=rows.context_lens,
            max_seqlen_k=rows.context_max,
            softmax_scale=scale,
            topk_indices=chosen,
            block_table=rows.block_tables,
            kv_lora_rank=rank,
        )
        return output

    def gemm(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`x @ weight.T + bias`: 16 bits `[T, K]`, `[N, K]`, `[N]`."""
        product: Tensor = self._function("gemm_a16w16", "gemm_a16w16")(x=x, w=weight, bias=bias, dtype=x.dtype)
        return product

    def gemm_fp8(self, x: "Scaled", weight: "Scaled", bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """`gemm` of 8-bit floats with one scale per row each: x `[T, K]`, weight `[N, K]`, bias 16 bits `[N]`; `[T, N]` of 16 bits."""
        function = self._function("gemm_a8w8", "gemm_a8w8")
        product: Tensor = function(
            x=x.values, w=weight.values, x_scale=x.scales.view(-1, 1), w_scale=weight.scales.view(1, -1), bias=bias, dtype=dtype
        )
        return product

    def gemm_fp8_block(self, x: "Scaled", weight: "Scaled", dtype: torch.dtype) -> Tensor:
        """As `gemm_fp8`, x with a scale per 128 elements `[T, K / 128]`, the weight per 128 by 128 `[N / 128, K / 128]`."""
        function = self._function("gemm_a8w8_blockscale", "gemm_a8w8_blockscale")
        product: Tensor = function(x=x.values, w=weight.values, x_scale=x.scales, w_scale=weight.scales, dtype=dtype)
        return product

    def quantize(self, x: Tensor) -> "Scaled":
        """x 16 bits `[T, K]` as 8-bit floats, one scale per row."""
        values, scales = torch.empty_like(x, dtype=self.library.fp8), x.new_empty(len(x), dtype=torch.float32)
        self._function("quant", "dynamic_per_token_quant_fp8_i8")(qx=values, x_in=x, scale_out=scales)
        # Of a row of zeros, whose scale is 0, AITER makes NaN.
        values.view(torch.uint8).masked_fill_(scales.unsqueeze(1) == 0, 0)
        return Scaled(values, scales)

    def quantize_groups(self, x: Tensor) -> "Scaled":
        """x 16 bits `[T, K]` as 8-bit floats, one scale per 128 elements, `[T, K / 128]`."""
        function = self._function("fused_fp8_quant", "fused_flatten_fp8_group_quant")
        return Scaled(*function(x=x.view(len(x), -1, 128), group_size=128, dtype_quant=self.library.fp8))

    @cached_property
    def _rope_module(self) -> str:
        """The one whose old name newer versions do not know."""
        return "rope.rope" if self.library.has("aiter.ops.triton.rope.rope", "rope_cached_fwd") else "rope"

    @property
    def has_silu_and_mul(self) -> bool:
        """Whether this AITER has the kernel: its published wheel has not."""
        return self._has_silu_and_mul

    @cached_property
    def _has_silu_and_mul(self) -> bool:
        return self.library.has("aiter.ops.triton.activation", "fused_silu_mul")

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """`silu(x[:, :n]) * x[:, n:]`: x 16 bits `[T, 2 * n]`, contiguous."""
        product: Tensor = self._function("activation", "fused_silu_mul")(x=x)
        return product

    def sort_tokens(self, ids: Tensor, num_experts: int, block_size: int) -> SortedTokens:
        """Of expert ids int32 `[T, num_chosen]`; those outside `[0, num_experts)` are of experts that are not here."""
        here = (ids >= 0) & (ids < num_experts)
        pairs_max = ids.numel() + (num_experts + 1) * (block_size - 1)
        pairs = ids.new_full((pairs_max,), ids.numel())
        experts, count = ids.new_empty(-(-pairs_max // block_size)), ids.new_empty(1)
        self._function("moe_align_block_size", "moe_align_block_size_triton")(
            topk_ids=torch.where(here, ids, num_experts),
            num_experts=num_experts + 1,
            block_size=block_size,
            sorted_token_ids=pairs,
            expert_ids=experts,
            num_tokens_post_pad=count,
        )
        return SortedTokens(pairs, torch.where(experts == num_experts, -1, experts), count, block_size)

    def gemm_experts(self, x: Tensor, weight: Tensor, tokens: SortedTokens, ids: Tensor, weights: Tensor | None) -> Tensor:
        """`weight[ids[t, k]] @ x[t]` of each pair, times `weights[t, k]` float32 where they are given, `[T, num_chosen, N]`: x 16 bits `[T, K]`, or
        `[T * num_chosen, K]` with a vector for each pair; weight 16 bits `[num_experts, N, K]`; ids int32 `[T, num_chosen]`. Zero where an
        expert is not here."""
        output = x.new_empty(*ids.shape, weight.shape[1])
        self._function("moe_op", "fused_moe")(
            A=x,
            B=weight,
            C=output,
            A_scale=None,
            B_scale=None,
            B_zp=None,
            topk_weights=ids if weights is None else weights,  # read only where they multiply
            topk_ids=ids,
            sorted_token_ids=tokens.pairs,
            expert_ids=tokens.experts,
            num_tokens_post_padded=tokens.count,
            mul_routed_weight=weights is not None,
            top_k=ids.numel() // len(x),
            compute_type=self.library.triton_dtype(x.dtype),
            use_fp8_w8a8=False,
            use_int8_w8a16=False,
            use_int4_w4a16=False,
            config=_tiles(tokens.block_size),
        )
        return output

    def _function(self, module: str, name: str) -> AiterFunction:
        return self.library.function(f"aiter.ops.triton.{module}", name)


@dataclass(frozen=True, slots=True, eq=False)
class KVCache:
    """A layer's keys and values `[blocks, block_size, KH, D]`, 16 bits or 8-bit floats; the latter are the number divided by a scale float32 `[1]`."""

    keys: Tensor
    values: Tensor
    key_scale: Tensor
    value_scale: Tensor

    @property
    def is_scaled(self) -> bool:
        """Whether they are 8-bit floats."""
        return self.keys.dtype.itemsize == 1


@dataclass(frozen=True, slots=True, eq=False)
class Scaled:
    """8-bit floats, and the float32 scales that they are to be multiplied by."""

    values: Tensor
    scales: Tensor


def _tiles(block_size: int) -> dict[str, Any]:
    """Tile sizes of the experts' GEMM for blocks of so many pairs, the others as AITER's table has them for few tokens."""
    return {
        "BLOCK_SIZE_M": block_size,
        "BLOCK_SIZE_N": 64,
        "BLOCK_SIZE_K": 64,
        "GROUP_SIZE_M": 4,
        "num_warps": 4,
        "num_stages": 2,
    }
