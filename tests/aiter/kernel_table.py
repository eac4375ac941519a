"""Which of AITER's kernels each method of our calls launches, and by what it is proved."""

ONLY_AT_HEAD = frozenset({"has_silu_and_mul", "silu_and_mul"})
"""Of TritonCalls: what the published wheel has not, so that nothing of it can run here."""

TRITON_KERNELS = {
    "rms_norm": {"_rms_norm_kernel"},
    "add_rms_norm": {"_fused_add_rmsnorm_kernel"},
    "layer_norm": {"_layernorm_kernel"},
    "rotate": {"_rope_kernel_sbhd_cached_fwd"},
    "rotate_and_cache": {"_fused_qk_rope_reshape_and_cache_kernel"},
    "attention": {"kernel_unified_attention_2d", "kernel_unified_attention_3d", "reduce_segments"},
    "latent_attention": {"_fwd_grouped_kernel_stage1_rope", "_fwd_kernel_stage2"},
    "chosen_latent_attention": {"_kernel_unified_attention_sparse_mla_2d"},
    "gemm": {"_gemm_a16_w16_kernel"},
    "gemm_fp8": {"_gemm_a8w8_kernel"},
    "gemm_fp8_block": {"_gemm_a8w8_blockscale_kernel"},
    "quantize": {"_dynamic_per_token_quant_fp8_i8_kernel"},
    "quantize_groups": {"_fused_flatten_fp8_group_quant_kernel"},
    "sort_tokens": {f"_moe_align_block_size_stage{stage}_kernel" for stage in (1, 2, 3, 4)},
    "gemm_experts": {"_fused_moe_kernel"},
}
"""By method of TritonCalls: the kernels of the published wheel."""

GFX950_KERNELS = {"gemm_fp8_block": {"_gemm_a8w8_blockscale_reduce_kernel"}}
"""What comes to those of a method on gfx950."""

NATIVE_KINDS = {
    "rmsnorm2d_fwd": "CK",
    "rmsnorm2d_fwd_with_add": "CK",
    "layernorm2d_fwd": "CK",
    "rope_cached_positions_fwd_inplace": "HIP",
    "reshape_and_cache": "HIP",
    "flash_attn_varlen_func": "CK, ASM",
    "pa_fwd_asm": "ASM",
    "concat_and_cache_mla": "HIP",
    "mla_decode_fwd": "ASM",
    "mla_prefill_fwd": "ASM",
    "silu_and_mul": "HIP",
    "topk_softmax": "HIP",
    "biased_grouped_topk": "HIP",
    "shuffle_weight": "torch",
    "fused_moe": "CK",
    "mm": "hipBLASLt, ASM, torch",
    "per_token_quant": "HIP",
    "per_group_quant": "HIP",
    "gemm_a8w8_bpreshuffle": "CK",
    "gemm_a8w8_blockscale": "CK",
    "mixed_sample_outer_exponential": "HIP",
}
"""By method of NativeCalls: what its kernels are written in; of several, AITER chooses by size."""
