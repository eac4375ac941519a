"""Every method of our calls of AITER called with small tensors of the right shapes, for whoever looks at the calls and not at what they compute."""

from collections.abc import Callable

import torch
from torch import Tensor

from model_worker.kernels.aiter.native_calls import LatentRows, NativeCalls, VarlenRows
from model_worker.kernels.aiter.triton_calls import KVCache, PagedRows, Scaled, SortedTokens, TritonCalls

T, R, H, KH, D, N, K = 3, 2, 4, 2, 128, 128, 256
LATENT, ROTATED = 512, 64
EXPERTS, CHOSEN, WIDTH = 8, 2, 128
BLOCKS, BLOCK_SIZE = 4, 16
FP8 = torch.float8_e4m3fnuz


def bf16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def f32(*shape: int) -> Tensor:
    return torch.zeros(shape)


def fp8(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=FP8)


def i32(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def i64(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def flash_cache(dtype: torch.dtype) -> KVCache:
    keys, values = (torch.zeros(BLOCKS, BLOCK_SIZE, KH, D, dtype=dtype) for _ in range(2))
    return KVCache(keys, values, torch.ones(1), torch.ones(1))


def paged_rows() -> PagedRows:
    return PagedRows(i32(R + 1), i32(R), i32(R, 2), queries_max=2, context_max=20)


def latent_rows() -> LatentRows:
    return LatentRows(i32(R + 1), i32(R + 1), i32(8), torch.ones(R, dtype=torch.int32), queries_max=2)


TRITON: dict[str, Callable[[TritonCalls], object]] = {
    "rms_norm": lambda calls: calls.rms_norm(bf16(T, N), bf16(N), 1e-6),
    "add_rms_norm": lambda calls: calls.add_rms_norm(bf16(T, N), bf16(T, N), bf16(N), 1e-6),
    "layer_norm": lambda calls: calls.layer_norm(bf16(T, N), bf16(N), bf16(N), 1e-6),
    "rotate": lambda calls: calls.rotate(bf16(T, H, D), bf16(T, D // 2), bf16(T, D // 2)),
    "rotate_and_cache": lambda calls: [
        calls.rotate_and_cache(
            (bf16(T, H, D), bf16(T, KH, D), bf16(T, KH, D)),
            flash_cache(dtype),
            i64(T),
            (bf16(T, D // 2), bf16(T, D // 2)),
        )
        for dtype in (torch.bfloat16, FP8)
    ],
    "attention": lambda calls: [
        calls.attention(bf16(T, H, D), flash_cache(torch.bfloat16), paged_rows(), 0.1, window, sinks)
        for window, sinks in ((None, None), (8, f32(H)))
    ],
    "latent_attention": lambda calls: calls.latent_attention(
        bf16(T, 16, LATENT + ROTATED), bf16(64, 1, LATENT + ROTATED), LATENT, (i32(T + 1), i32(8)), 0.1, 4
    ),
    "chosen_latent_attention": lambda calls: calls.chosen_latent_attention(
        bf16(T, 16, LATENT + ROTATED),
        bf16(BLOCKS, BLOCK_SIZE, 1, LATENT + ROTATED),
        LATENT,
        i32(T, 4),
        paged_rows(),
        0.1,
    ),
    "gemm": lambda calls: [calls.gemm(bf16(T, K), bf16(N, K), bias) for bias in (None, bf16(N))],
    "gemm_fp8": lambda calls: calls.gemm_fp8(Scaled(fp8(T, K), f32(T)), Scaled(fp8(N, K), f32(N)), bf16(N), torch.bfloat16),
    "gemm_fp8_block": lambda calls: calls.gemm_fp8_block(
        Scaled(fp8(T, K), f32(T, K // 128)), Scaled(fp8(N, K), f32(N // 128, K // 128)), torch.bfloat16
    ),
    "quantize": lambda calls: calls.quantize(bf16(T, K)),
    "quantize_groups": lambda calls: calls.quantize_groups(bf16(T, K)),
    "has_silu_and_mul": lambda calls: calls.has_silu_and_mul,
    "silu_and_mul": lambda calls: calls.silu_and_mul(bf16(T, 2 * N)),
    "sort_tokens": lambda calls: calls.sort_tokens(i32(T, CHOSEN), EXPERTS, 16),
    "gemm_experts": lambda calls: [
        calls.gemm_experts(bf16(T, K), bf16(EXPERTS, N, K), SortedTokens(i32(64), i32(4), i32(1), 16), i32(T, CHOSEN), weights)
        for weights in (None, f32(T, CHOSEN))
    ],
}

NATIVE: dict[str, Callable[[NativeCalls], object]] = {
    "rmsnorm2d_fwd": lambda calls: calls.rmsnorm2d_fwd(bf16(T, N), bf16(N), 1e-6),
    "rmsnorm2d_fwd_with_add": lambda calls: calls.rmsnorm2d_fwd_with_add(bf16(T, N), bf16(T, N), bf16(N), 1e-6),
    "layernorm2d_fwd": lambda calls: calls.layernorm2d_fwd(bf16(T, N), bf16(N), bf16(N), 1e-6),
    "rope_cached_positions_fwd_inplace": lambda calls: calls.rope_cached_positions_fwd_inplace(
        bf16(T, H, D), f32(64, D // 2), f32(64, D // 2), i64(T)
    ),
    "reshape_and_cache": lambda calls: [
        calls.reshape_and_cache(
            bf16(T, KH, D),
            bf16(T, KH, D),
            (
                torch.zeros(BLOCKS, KH, D // x, BLOCK_SIZE, x, dtype=dtype),
                torch.zeros(BLOCKS, KH, BLOCK_SIZE // x, D, x, dtype=dtype),
            ),
            i64(T),
            torch.ones(2),
        )
        for dtype, x in ((torch.bfloat16, 8), (FP8, 16))
    ],
    "flash_attn_varlen_func": lambda calls: calls.flash_attn_varlen_func(
        bf16(T, H, D), bf16(8, KH, D), bf16(8, KH, D), VarlenRows(i32(R + 1), i32(R + 1), 2, 5), 0.1
    ),
    "pa_fwd_asm": lambda calls: [
        calls.pa_fwd_asm(
            bf16(R, H, D),
            (
                torch.zeros(BLOCKS, KH, D // x, BLOCK_SIZE, x, dtype=dtype),
                torch.zeros(BLOCKS, KH, BLOCK_SIZE // x, D, x, dtype=dtype),
            ),
            i32(R, 2),
            i32(R),
            scales,
        )
        for dtype, x, scales in ((torch.bfloat16, 8, None), (FP8, 16, f32(BLOCKS, KH, BLOCK_SIZE)))
    ],
    "concat_and_cache_mla": lambda calls: calls.concat_and_cache_mla(
        bf16(T, LATENT), bf16(T, ROTATED), bf16(BLOCKS, BLOCK_SIZE, LATENT + ROTATED), i64(T), torch.ones(1)
    ),
    "mla_decode_fwd": lambda calls: calls.mla_decode_fwd(
        bf16(R, 16, LATENT + ROTATED), bf16(64, 1, 1, LATENT + ROTATED), latent_rows(), 0.1
    ),
    "mla_prefill_fwd": lambda calls: calls.mla_prefill_fwd(
        bf16(T, 16, LATENT + ROTATED), bf16(64, 1, 1, LATENT + ROTATED), latent_rows(), 0.1
    ),
    "silu_and_mul": lambda calls: calls.silu_and_mul(bf16(T, 2 * N)),
    "topk_softmax": lambda calls: calls.topk_softmax(f32(T, EXPERTS), CHOSEN, True),
    "biased_grouped_topk": lambda calls: calls.biased_grouped_topk(f32(T, EXPERTS), f32(EXPERTS), CHOSEN, (4, 2), True, 2.5),
    "shuffle_weight": lambda calls: calls.shuffle_weight(bf16(N, K)),
    "fused_moe": lambda calls: calls.fused_moe(
        bf16(T, K),
        (bf16(EXPERTS, 2 * WIDTH, K), bf16(EXPERTS, K, WIDTH)),
        i32(T, CHOSEN),
        f32(T, CHOSEN),
        torch.ones(EXPERTS, dtype=torch.int32),
    ),
    "mm": lambda calls: [calls.mm(bf16(T, K), bf16(N, K), bias) for bias in (None, bf16(N))],
    "per_token_quant": lambda calls: calls.per_token_quant(bf16(T, K)),
    "per_group_quant": lambda calls: calls.per_group_quant(bf16(T, K)),
    "gemm_a8w8_bpreshuffle": lambda calls: calls.gemm_a8w8_bpreshuffle(fp8(T, K), fp8(N, K), f32(T, 1), f32(N, 1)),
    "gemm_a8w8_blockscale": lambda calls: calls.gemm_a8w8_blockscale(
        fp8(T, K), fp8(N, K), f32(T, K // 128), f32(N // 128, K // 128)
    ),
    "mixed_sample_outer_exponential": lambda calls: calls.mixed_sample_outer_exponential(f32(R, N), f32(R, N), f32(R)),
}


def method_names(calls: type) -> set[str]:
    """The public methods and properties of a class of calls."""
    return {
        name
        for name, member in vars(calls).items()
        if not name.startswith("_") and (callable(member) or isinstance(member, property))
    }
