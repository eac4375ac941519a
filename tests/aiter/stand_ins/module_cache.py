"""Writes of keys and values into caches of blocks."""

import torch
from torch import Tensor


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    asm_layout: bool = False,
) -> None:
    """Keys lie as [blocks, heads, head_size / x, block_size, x] where x is 16 bytes; values as [blocks, heads, block_size / x, head_size, x] if
    `asm_layout`, else as [blocks, heads, head_size, block_size]. A slot of -1 is skipped."""
    blocks, heads, _, block_size, x = key_cache.shape
    values = value_cache.view(blocks, heads, block_size // x, -1, x) if asm_layout else value_cache
    if kv_cache_dtype == "fp8":
        assert k_scale is not None and v_scale is not None
        key, value = key.float() / k_scale, value.float() / v_scale
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        block, offset = divmod(slot, block_size)
        key_cache[block, :, :, offset] = key[token].view(heads, -1, x).to(key_cache.dtype)
        if asm_layout:
            values[block, :, offset // x, :, offset % x] = value[token].to(value_cache.dtype)
        else:
            values[block, :, :, offset] = value[token].to(value_cache.dtype)


def concat_and_cache_mla(
    kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_cache_dtype: str, scale: Tensor
) -> None:
    """To [blocks, block_size, latent + rotated]. A slot of -1 is skipped."""
    assert kv_cache_dtype == "auto" and scale.numel() == 1
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            kv_cache[slot // kv_cache.shape[1], slot % kv_cache.shape[1]] = torch.cat((kv_c[token], k_pe[token]))
