"""AITER's compiled kernels (CK, ASM, HIP) as this project calls them: one method for each, raw tensors in and out, nothing of a model.

T are tokens, H query heads, KH KV heads, D head_dim, bs block size; x is how many elements of a cache take 16 bytes. Activations are bfloat16
unless a method says otherwise, and lie on the GPU. Where a method says "at the head of AITER", the published wheel differs; both are served.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model_worker.kernels.aiter.library import AiterFunction, AiterLibrary

_NEOX = 0
"""AITER's number for rotating element i with i + D / 2."""

_SAMPLE_EPS = 1e-10


@dataclass(frozen=True, slots=True, eq=False)
class VarlenRows:
    """Rows of new tokens over their contexts. `starts` int32 `[R + 1]`: row i owns the queries `[starts[i], starts[i + 1])`; `context_starts`
    int32 `[R + 1]`: the same of keys. A row's last query is at its context's end. `queries_max`, `context_max`: of one row, host numbers."""

    starts: Tensor
    context_starts: Tensor
    queries_max: int
    context_max: int


@dataclass(frozen=True, slots=True, eq=False)
class LatentRows:
    """Rows of queries over a pool of latent vectors, by token. `starts` int32 `[R + 1]` of queries; `context_starts` int32 `[R + 1]` into
    `slots` int32 `[sum of contexts, or more]`, each position's place in the pool; `last_page` int32 `[R]`, ones: a page is a token."""

    starts: Tensor
    context_starts: Tensor
    slots: Tensor
    last_page: Tensor
    queries_max: int


class NativeCalls:
    """See above. Raises AiterUnavailable where this AITER lacks an operation or an argument."""

    def __init__(self, library: AiterLibrary) -> None:
        self._library = library

    def rmsnorm2d_fwd(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root mean square norm over the last dimension of `x` `[T, n]`; `weight` `[n]`."""
        return self._tensor("rmsnorm2d_fwd", input=x, weight=weight, epsilon=eps)

    def rmsnorm2d_fwd_with_add(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The norm of `x + residual`, and that sum; all `[T, n]`."""
        normed, total = torch.empty_like(x), torch.empty_like(x)
        self._op("rmsnorm2d_fwd_with_add")(
            out=normed, input=x, residual_in=residual, residual_out=total, weight=weight, epsilon=eps
        )
        return normed, total

    def layernorm2d_fwd(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """Layer norm over the last dimension of `x` `[T, n]`; `weight` and `bias` `[n]`."""
        return self._tensor("layernorm2d_fwd", input=x, weight=weight, bias=bias, epsilon=eps)

    def rope_cached_positions_fwd_inplace(self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
        """Rotate the first 2 n elements of each head of `x` `[T, heads, D]` in place, element i with i + n, by row `positions[t]` (int64 `[T]`)
        of `cos` and `sin` `[N, n]`, float32 or x's dtype. Heads may lie anywhere; their elements lie together."""
        self._op("rope_cached_positions_fwd_inplace", "aiter.ops.rope")(
            input=x[..., : 2 * cos.shape[1]].unsqueeze(0),
            cos=cos.view(len(cos), 1, 1, -1),
            sin=sin.view(len(sin), 1, 1, -1),
            positions=positions.unsqueeze(0),
            rotate_style=_NEOX,
            reuse_freqs_front_part=True,
            nope_first=False,
        )

    def reshape_and_cache(
        self, key: Tensor, value: Tensor, caches: tuple[Tensor, Tensor], slots: Tensor, scales: Tensor
    ) -> None:
        """Write `key` and `value` `[T, KH, D]` to `caches`, keys `[blocks, KH, D/x, bs, x]` and values `[blocks, KH, bs/x, D, x]`, at `slots`
        int64 `[T]` (block * bs + offset; negative: nowhere). To a cache of 8-bit floats divided by `scales` float32 `[2]`, a key's and a
        value's. The heads of a token lie together."""
        is_fp8 = caches[0].dtype.itemsize == 1
        self._op("reshape_and_cache")(
            key=key,
            value=value,
            key_cache=caches[0],
            value_cache=caches[1],
            slot_mapping=slots,
            kv_cache_dtype="fp8" if is_fp8 else "auto",
            k_scale=scales[:1] if is_fp8 else None,
            v_scale=scales[1:] if is_fp8 else None,
            asm_layout=True,
        )

    def flash_attn_varlen_func(self, query: Tensor, key: Tensor, value: Tensor, rows: VarlenRows, scale: float) -> Tensor:
        """Causal attention of `query` `[T, H, D]` over `key` and `value` `[tokens, KH, D]`; `[T, H, D]`. The mask is aligned at the bottom
        right: a row's last query sees all of its context."""
        return self._tensor(
            "flash_attn_varlen_func",
            q=query,
            k=key,
            v=value,
            cu_seqlens_q=rows.starts,
            cu_seqlens_k=rows.context_starts,
            max_seqlen_q=rows.queries_max,
            max_seqlen_k=rows.context_max,
            softmax_scale=scale,
            causal=True,
        )

    def pa_fwd_asm(
        self, query: Tensor, caches: tuple[Tensor, Tensor], tables: Tensor, context_lens: Tensor, unit_scales: Tensor | None
    ) -> Tensor:
        """Attention of one query per row, `[R, H, 128]`, contiguous, scaled by 128 ** -0.5, over caches as `reshape_and_cache` writes them, of blocks of 16;
        `tables` int32 `[R, blocks]`, contiguous, `context_lens` int32 `[R]`. H / KH is 16 at most. Of 8-bit caches each token has a scale:
        `unit_scales` float32 `[blocks, KH, 16]`, for keys and values. Returns `[R, H, 128]`."""
        return self._tensor(
            "pa_fwd_asm",
            Q=query,
            K=caches[0],
            V=caches[1],
            block_tables=tables,
            context_lens=context_lens,
            block_tables_stride0=tables.stride(0),
            K_QScale=unit_scales,
            V_QScale=unit_scales,
            high_precision=0,
        )

    def concat_and_cache_mla(self, latent: Tensor, rotated: Tensor, cache: Tensor, slots: Tensor, scale: Tensor) -> None:
        """Write `latent` `[T, n]` and behind it `rotated` `[T, m]` to `cache` `[blocks, bs, n + m]` at `slots` int64 `[T]`. `scale` float32 `[1]`
        is for 8-bit caches."""
        self._op("concat_and_cache_mla")(
            kv_c=latent, k_pe=rotated, kv_cache=cache, slot_mapping=slots, kv_cache_dtype="auto", scale=scale
        )

    def mla_decode_fwd(self, query: Tensor, cache: Tensor, rows: LatentRows, scale: float) -> Tensor:
        """Attention of one query per row, `[R, H, 576]`, over vectors `[slots, 1, 1, 576]`, of which the first 512 are the values too. H is 16 or
        128. Returns `[R, H, 512]`. At the head of AITER the size of a page is an argument; here it is 1, as the cache's shape says."""
        output = query.new_empty(*query.shape[:2], 512)
        # It keeps a tensor for further calls like this. A graph would go on reading that one when it is long gone: each call is to make its own.
        self._library.forget("aiter.mla", "get_meta_param")
        self._op("mla_decode_fwd", "aiter.mla")(
            q=query,
            kv_buffer=cache,
            o=output,
            qo_indptr=rows.starts,
            kv_indptr=rows.context_starts,
            kv_indices=rows.slots,
            kv_last_page_lens=rows.last_page,
            max_seqlen_q=rows.queries_max,
            sm_scale=scale,
        )
        return output

    def mla_prefill_fwd(self, query: Tensor, cache: Tensor, rows: LatentRows, scale: float) -> Tensor:
        """As `mla_decode_fwd`, causal, for rows with several queries: `[T, H, 576]`."""
        output = query.new_empty(*query.shape[:2], 512)
        self._op("mla_prefill_fwd", "aiter.mla")(
            q=query,
            kv_buffer=cache,
            o=output,
            qo_indptr=rows.starts,
            kv_indptr=rows.context_starts,
            kv_indices=rows.slots,
            kv_last_page_lens=rows.last_page,
            max_seqlen_q=rows.queries_max,
            sm_scale=scale,
        )
        return output

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """`silu(x[:, :n]) * x[:, n:]` of `x` `[T, 2 n]`."""
        output = x.new_empty(len(x), x.shape[1] // 2)
        self._op("silu_and_mul")(out=output, input=x)
        return output

    def topk_softmax(self, logits: Tensor, num_chosen: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        """Ids int32 and weights float32 `[T, num_chosen]` of the largest softmax of `logits` `[T, experts]`, float32 or bfloat16."""
        ids, weights = _chosen(logits, num_chosen)
        self._op("topk_softmax")(
            topk_weights=weights,
            topk_indices=ids,
            token_expert_indices=torch.empty_like(ids),
            gating_output=logits,
            need_renorm=renormalize,
        )
        return ids, weights

    def biased_grouped_topk(
        self, logits: Tensor, bias: Tensor, num_chosen: int, groups: tuple[int, int], renormalize: bool, factor: float
    ) -> tuple[Tensor, Tensor]:
        """Ids int32 and weights float32 `[T, num_chosen]`: sigmoid of `logits` `[T, experts]`, and `bias` `[experts]` of the same dtype for the
        choice. `groups`: how many there are (1, 2, 4 or 8) and how many are chosen; weights are multiplied by `factor`."""
        ids, weights = _chosen(logits, num_chosen)
        self._op("biased_grouped_topk")(
            gating_output=logits,
            correction_bias=bias,
            topk_weights=weights,
            topk_ids=ids,
            num_expert_group=groups[0],
            topk_group=groups[1],
            need_renorm=renormalize,
            routed_scaling_factor=factor,
        )
        return ids, weights

    def shuffle_weight(self, weight: Tensor) -> Tensor:
        """A copy of `weight` `[..., N, K]` as the matrix cores read it: tiles of 16 rows by 64 bytes. N divides by 16, K by 32."""
        return self._tensor("shuffle_weight", "aiter.ops.shuffle", x=weight, layout=(16, 16))

    def fused_moe(self, x: Tensor, weights: tuple[Tensor, Tensor], ids: Tensor, factors: Tensor, mask: Tensor | None) -> Tensor:
        """The sum of `factors` float32 `[T, k]` times what the experts `ids` int32 `[T, k]` give for `x` `[T, hidden]`. `weights`, shuffled: gate
        above up `[experts, 2 n, hidden]`, and down `[experts, hidden, n]`. `mask` int32 `[ids]`: 1 for each id that has weights, in their order, 0
        for those that add nothing; None: all have. The tensors that `shuffle_weight` gave, no views: they carry a mark."""
        return self._tensor(
            "fused_moe",
            "aiter.fused_moe",
            hidden_states=x,
            w1=weights[0],
            w2=weights[1],
            topk_weight=factors,
            topk_ids=ids,
            expert_mask=mask,
            activation=self._enum("ActivationType").Silu,
            quant_type=self._enum("QuantType").No,
        )

    def mm(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`x @ weight.T + bias` with the solution that was tuned for its size: `x` `[T, K]`, `weight` `[N, K]`, contiguous, `bias` `[N]`."""
        return self._tensor("tgemm.mm", "aiter.tuned_gemm", inp=x, weights=weight, bias=bias)

    def per_token_quant(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`x` `[T, K]` as 8-bit floats, and a scale for each token, float32 `[T, 1]`."""
        return self._quantized("per_Token", x)

    def per_group_quant(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`x` `[T, K]` as 8-bit floats, and a scale for each 128 elements of a token, float32 `[T, K / 128]`."""
        return self._quantized("per_1x128", x)

    def gemm_a8w8_bpreshuffle(self, x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor) -> Tensor:
        """`x @ weight.T` in bfloat16 of 8-bit floats: `x` `[T, K]`, `weight` `[N, K]` shuffled; scales float32 `[T, 1]` and `[N, 1]`."""
        return self._tensor(
            "gemm_a8w8_bpreshuffle", XQ=x, WQ=weight, x_scale=x_scale, w_scale=weight_scale, dtype=torch.bfloat16
        )

    def gemm_a8w8_blockscale(self, x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor) -> Tensor:
        """As `gemm_a8w8_bpreshuffle`, `weight` as it is: scales float32 `[T, K / 128]`, and `[N / 128, K / 128]` for each 128 x 128 of the weight."""
        return self._tensor(
            "gemm_a8w8_blockscale", XQ=x, WQ=weight, x_scale=x_scale, w_scale=weight_scale, dtype=torch.bfloat16
        )

    def mixed_sample_outer_exponential(self, logits: Tensor, exponentials: Tensor, temperatures: Tensor) -> Tensor:
        """The token with the largest softmax(logits / temperature) / exponential, int32 `[R]`; the largest logit where a temperature is 0. `logits`
        `[R, vocab]`, `exponentials` float32 `[R, vocab]`, `temperatures` float32 `[R]`. By position: AITER renamed a parameter. A row of
        `exponentials` may be that of others (stride 0)."""
        tokens = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
        self._op("mixed_sample_outer_exponential").function(tokens, logits, exponentials, temperatures, _SAMPLE_EPS)
        return tokens

    def _op(self, name: str, module: str = "aiter") -> AiterFunction:
        return self._library.function(module, name)

    def _tensor(self, name: str, module: str = "aiter", **arguments: Any) -> Tensor:
        result: Tensor = self._op(name, module)(**arguments)
        return result

    def _enum(self, name: str) -> Any:
        return self._op(name).function

    def _quantized(self, kind: str, x: Tensor) -> tuple[Tensor, Tensor]:
        quantize = self._op("get_hip_quant")(qType=getattr(self._enum("QuantType"), kind))
        quantized, scale = quantize(x, quant_dtype=self._library.fp8)
        return quantized, scale


def _chosen(logits: Tensor, num_chosen: int) -> tuple[Tensor, Tensor]:
    """Room for ids and weights."""
    ids = torch.empty(len(logits), num_chosen, dtype=torch.int32, device=logits.device)
    return ids, torch.empty_like(ids, dtype=torch.float32)
