"""The pool's size, layout and laziness."""

from pathlib import Path

import pytest
import torch

from model_worker.kv_pool import KVPool, KVPoolTooSmall, kv_bytes_per_token, num_blocks_for


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_size_of_the_default_pool() -> None:
    """30 layers, 3 heads of 64, keys and values of 4 bytes: 46,080 bytes a token."""
    assert kv_bytes_per_token(30, 3, 64) == 46_080
    assert num_blocks_for(512 * 1024 * 1024, 16, 46_080) == 728


def test_a_pool_too_small_for_one_block_is_refused_with_numbers() -> None:
    assert num_blocks_for(16 * 100, 16, 100) == 1
    with pytest.raises(KVPoolTooSmall, match=r"1599.*1600"):
        num_blocks_for(16 * 100 - 1, 16, 100)


def test_geometry_and_views() -> None:
    kv = KVPool(2, 5, 16, 3, 8)
    assert (kv.geometry.num_blocks, kv.geometry.block_size, kv.geometry.kv_format) == (5, 16, "torch/f32")
    assert kv.geometry.bytes_per_token == kv.bytes_per_token == 2 * 2 * 3 * 8 * 4
    assert kv.keys(1).shape == kv.values(1).shape == (6, 3, 16, 8)
    kv.keys(1)[kv.null_block - 1] = 7.0
    assert kv.keys(0).eq(0).all() and kv.values(1).eq(0).all() and kv.keys(1)[kv.null_block].eq(0).all()
    assert KVPool(1, 1, 1, 1, 8, torch.bfloat16).geometry.kv_format == "torch/bf16"


def test_memory_becomes_resident_as_it_is_written() -> None:
    before = resident_bytes()
    kv = KVPool(30, 728, 16, 3, 64)
    assert resident_bytes() - before < 16 << 20, "an unused pool of 512 MiB costs next to nothing"
    for layer in range(15):
        kv.keys(layer).fill_(1.0)
    assert resident_bytes() - before > 100 << 20
