"""The pool's size, layout and laziness."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from model_worker import resident_pages
from model_worker.host_pool import HostPool
from model_worker.kv_layout import KEYS_TRANSPOSED, PAIRED, SHUFFLED, TOKEN_MAJOR
from model_worker.kv_pool import KVPool, KVPoolTooSmall, KVStore, num_blocks_for, reserved_zeros
from model_worker.kv_shape import KVShape
from tessera.values.config import ConfigError


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_size_of_the_default_pool() -> None:
    """30 layers, 3 heads of 64, keys and values of 4 bytes: 46,080 bytes a token."""
    assert KVShape(30, 3, 64).bytes_per_token() == 46_080
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
    assert KVPool(1, 1, 1, 1, 8, KVStore(torch.bfloat16)).geometry.kv_format == "torch/bf16"


def test_one_vector_that_is_both_key_and_value_takes_half_the_room() -> None:
    """DeepSeek-V3 keeps 512 + 64 floats of a position in each of 61 layers."""
    assert KVShape(61, 1, 576, num_planes=1).bytes_per_token() == 140_544
    kv = KVPool.of_shape(KVShape(2, 1, 8, num_planes=1), 5, 16)
    assert (kv.geometry.bytes_per_token, kv.geometry.kv_format) == (2 * 8 * 4, "torch/f32/latent")
    kv.keys(1)[2, 0, 3] = 7.0
    assert kv.values(1)[2, 0, 3].eq(7.0).all() and kv.values(0).eq(0).all()
    assert kv.raw_block(2).shape == (2, 1, 1, 16, 8) and kv.block(2).shape == (2, 1, 16, 1, 8)
    host = HostPool(kv, 2)
    host.swap_out(np.array([[2, 1]], np.int32))
    host.swap_in(np.array([[1, 4]], np.int32))
    assert np.array_equal(kv.block(4), kv.block(2)) and kv.block(4).any()


def test_memory_becomes_resident_as_it_is_written() -> None:
    before = resident_bytes()
    kv = KVPool(30, 728, 16, 3, 64)
    assert resident_bytes() - before < 16 << 20, "an unused pool of 512 MiB costs next to nothing"
    for layer in range(15):
        kv.keys(layer).fill_(1.0)
    assert resident_bytes() - before > 100 << 20


STORES = [KVStore(), KVStore(torch.bfloat16), KVStore(torch.bfloat16, "flash", TOKEN_MAJOR), KVStore(torch.float8_e4m3fnuz)]


@pytest.mark.parametrize("store", STORES)
def test_blocks_move_between_the_pools_whole_and_alone(store: KVStore) -> None:
    kv = KVPool(2, 5, 16, 3, 8, store)
    host = HostPool(kv, 4)
    for block in range(5):
        kv.raw_block(block).copy_(torch.randn(2, 2, 3, 16, 8))
    before = [kv.block(block) for block in range(5)]
    host.swap_out(np.array([[4, 0], [1, 3]], np.int32))
    assert np.array_equal(host.block(0), before[4]) and np.array_equal(host.block(3), before[1])
    assert not host.block(1).any() and not host.block(2).any()
    host.swap_in(np.array([[3, 2], [2, 0]], np.int32))
    assert np.array_equal(kv.block(2), before[1]) and not kv.block(0).any()
    kv.copy_blocks(np.array([[4, 3], [2, 0]], np.int32))
    assert np.array_equal(kv.block(3), before[4]) and np.array_equal(kv.block(0), before[1])
    kv.zero_blocks(np.array([1, 3], np.int32))
    held = [before[1], np.zeros_like(before[0]), before[1], np.zeros_like(before[0]), before[4]]
    assert all(np.array_equal(kv.block(block), content) for block, content in enumerate(held))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_block_reads_the_same_whatever_its_layout(dtype: torch.dtype) -> None:
    """By position, as a block table orders them; 8-bit floats times the scale of their layer."""
    content = torch.randint(-8, 8, (2, 2, 4, 3, 8)).float()  # layers, planes, offsets, heads, elements
    head_major = KVPool(2, 3, 4, 3, 8, KVStore(dtype))
    token_major = KVPool(2, 3, 4, 3, 8, KVStore(dtype, "flash", TOKEN_MAJOR))
    assert token_major.keys(0).shape == (4, 4, 3, 8) and token_major.geometry.kv_format.startswith("flash/")
    for layer in range(2):
        for plane, view in enumerate(("keys", "values")):
            getattr(head_major, view)(layer)[1] = content[layer, plane].transpose(0, 1).to(dtype)
            getattr(token_major, view)(layer)[1] = content[layer, plane].to(dtype)
    assert np.array_equal(head_major.block(1), content.numpy()) and np.array_equal(token_major.block(1), content.numpy())
    token_major.scales[1, 0] = 0.5
    content[1, 0] *= 0.5 if dtype.itemsize == 1 else 1.0
    assert np.array_equal(token_major.block(1), content.numpy())


@pytest.mark.parametrize(
    "store",
    [
        *STORES,
        KVStore(torch.bfloat16, "aiter-native", SHUFFLED),
        KVStore(torch.float16, "cpu", KEYS_TRANSPOSED),
        KVStore(torch.bfloat16, "cpu", PAIRED),
    ],
)
def test_positions_are_cleared_in_every_layer_and_no_others(store: KVStore) -> None:
    kv = KVPool.of_shape(KVShape(2, 3, 8), 4, 16, store, paired=KVShape(1, 1, 16, num_planes=1))
    assert kv.paired is not None
    for pool in (kv, kv.paired):
        for block in range(4):
            pool.raw_block(block).copy_(torch.ones(pool.raw_block(block).shape))
    kv.zero_positions(np.array([17, 47, 63, 60]))
    for pool in (kv, kv.paired):
        content = np.stack([pool.block(block) for block in range(4)])
        assert [tuple(at) for at in np.argwhere(content[:, 0, 0, :, 0, 0] == 0)] == [(1, 1), (2, 15), (3, 12), (3, 15)]
        assert (content.std(axis=(1, 2, 4, 5)) == 0).all(), "in all layers, keys and values alike"


def test_a_host_pool_costs_nothing_until_it_is_used() -> None:
    kv = KVPool(30, 16, 16, 3, 64)
    before = resident_bytes()
    host = HostPool(kv, 728)
    assert resident_bytes() - before < 16 << 20
    kv.raw_block(0).fill_(1.0)
    host.swap_out(np.array([[0, block] for block in range(364)], np.int32))
    assert resident_bytes() - before > 100 << 20
    assert HostPool(kv, 0).num_blocks == 0


def test_a_pool_is_backed_while_it_is_written() -> None:
    kv = KVPool(30, 364, 16, 3, 64)
    kv.raw_block(7).fill_(2.0)
    before = resident_bytes()
    thread = threading.Thread(target=kv.make_resident)
    thread.start()
    kv.raw_block(200).fill_(3.0)
    thread.join()
    assert resident_bytes() - before > 100 << 20
    assert [float(kv.raw_block(block).float().mean()) for block in (7, 200, 300)] == [2.0, 3.0, 0.0]


def test_no_memory_is_taken_that_others_need(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = KVPool(30, 364, 16, 3, 64)
    monkeypatch.setattr(resident_pages, "SPARE_BYTES", 2**60)
    before = resident_bytes()
    assert not kv.make_resident()
    assert resident_bytes() - before < 16 << 20


@pytest.mark.parametrize(("limit", "expected"), [("max", 4096000), ("1000000", 400000), (None, 4096000)])
def test_a_container_s_limit_counts_too(tmp_path: Path, limit: str | None, expected: int) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 4000 kB\n")
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text("600000\n")
    assert resident_pages.available_bytes(tmp_path, tmp_path) == expected
    assert resident_pages.available_bytes(tmp_path / "nowhere", tmp_path) == 0


def test_a_pool_for_which_there_is_no_memory_says_which_options_to_lower():
    with pytest.raises(ConfigError, match="lower kv_cache_bytes or swap_bytes"):
        reserved_zeros((2**40, 2**20), torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_shuffled_blocks_lie_as_assembly_reads_them_and_are_read_back_by_position(dtype: torch.dtype) -> None:
    """Of a head 16 bytes of a key lie together, then the next position's; of values 16 bytes' worth of positions of one element."""
    store = KVStore(dtype, "aiter-native", SHUFFLED)
    kv, x = KVPool.of_shape(KVShape(2, 3, 32), 4, 16, store), 16 // dtype.itemsize
    assert kv.keys(1).shape == (5, 3, 32 // x, 16, x) and kv.values(1).shape == (5, 3, 16 // x, 32, x)
    expected = torch.randint(-8, 8, (2, 2, 16, 3, 32)).float()
    for layer, position, head in np.ndindex(2, 16, 3):
        key, value = expected[layer, :, position, head].to(dtype)
        kv.keys(layer)[2, head, :, position] = key.view(-1, x)
        kv.values(layer)[2, head, position // x, :, position % x] = value
    assert np.array_equal(kv.block(2), expected.numpy())
    kv.copy_blocks(np.array([[2, 0]], np.int32))
    assert np.array_equal(kv.block(0), expected.numpy()) and not kv.block(1).any()


def test_a_single_plane_is_never_shuffled() -> None:
    kv = KVPool.of_shape(KVShape(1, 1, 32, num_planes=1), 4, 16, KVStore(torch.bfloat16, "aiter-native", SHUFFLED))
    assert kv.keys(0).shape == kv.values(0).shape == (5, 16, 1, 32)
    kv.keys(0)[3, 5] = 7.0
    assert np.flatnonzero(kv.block(3).any(axis=(0, 1, 3, 4))).tolist() == [5]
