"""Attention of the Triton flavour over its own pool layout, on AITER's real kernels, against the torch backend over its own, in float32. What others
left in a block is large (no NaN: see `Engine._clear`)."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from model_worker.batch import Batch
from model_worker.kernels.aiter import triton_latent
from model_worker.kernels.aiter.library import AiterLibrary
from model_worker.kernels.aiter.triton_attention import BlockSizeUnfit, TritonAttention
from model_worker.kernels.aiter.triton_backend import AiterTritonKernels
from model_worker.kernels.interface import Kernels, PagedAttention, WindowedAttention
from model_worker.kernels.torch_backend import TorchKernels
from model_worker.kernels.torch_rotation import rotate_heads
from model_worker.kv_pool import KVPool
from model_worker.kv_shape import KVShape
from model_worker.placement import Placement
from tessera.values.config import ConfigError
from tests.model_worker.paged_driver import PagedDriver, build_batch

BLOCK = 16
ROWS = {"decodes": ([33, 17, 5], [1, 1, 1]), "drafts": ([40, 21], [3, 3]), "mixed": ([33, 20, 9], [1, 4, 9])}
"""Contexts, and how many of their last positions are computed."""

BOUND = 0.02
"""Of outputs of about one: those of bfloat16 are rounded to 2 ** -9 of themselves, as are keys, values and weights before."""


@dataclass(frozen=True)
class Step:
    """The last positions of some rows over a pool in which their earlier ones lie; `new`: what is stored of them."""

    pool: KVPool
    batch: Batch
    new: tuple[Tensor, Tensor]


def tensors(*shape: int) -> Tensor:
    """Normal numbers that bfloat16 holds exactly, float32."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16().float()


def step(
    kernels: Kernels, shape: KVShape, rows: tuple[Sequence[int], Sequence[int]], kv_dtype: torch.dtype | None = None
) -> Step:
    """`rows` as in ROWS; the numbers depend on them and on the shape alone."""
    lens, counts = rows
    pool = KVPool.of_shape(shape, sum(-(-length // BLOCK) for length in lens), BLOCK, kernels.kv_store(kv_dtype))
    if pool.dtype.itemsize == 1:
        pool.scales.copy_(torch.tensor([[0.02, 0.03]]))
    for plane in (pool.keys(0), pool.values(0)):
        plane[: pool.null_block].view(torch.uint8).fill_(0x7B)
    driver, runs, new = PagedDriver(None, pool), [], []
    for length, count in zip(lens, counts, strict=True):
        kept = tensors(2, length, shape.num_kv_heads, shape.head_dim).to(kernels.placement.dtype)
        if shape.num_planes == 1:
            kept = kept[:1].expand(2, -1, -1, -1)
        run = driver.start([0] * length)
        run.table = driver.take_blocks(-(-length // BLOCK))
        if length > count:
            earlier = length - count
            attention = kernels.paged_attention(build_batch([(run, earlier)], BLOCK), pool)
            attention.store(0, kept[0, :earlier], kept[1, :earlier])
            run.computed = earlier
        runs.append((run, count))
        new.append(kept[:, length - count :])
    keys, values = torch.cat(new, dim=1)
    return Step(pool, build_batch(runs, BLOCK), (keys, values))


@pytest.fixture
def ours(arch: str) -> AiterTritonKernels:
    return AiterTritonKernels(AiterLibrary(arch), Placement(torch.device("cpu"), torch.bfloat16))


def attend(kernels: Kernels, step: Step, num_heads: int) -> Tensor:
    """Float32, what `attend` gives once the new keys and values are stored."""
    query = tensors(step.batch.num_tokens, num_heads, step.pool.head_dim).to(kernels.placement.dtype)
    attention = kernels.paged_attention(step.batch, step.pool)
    attention.store(0, *step.new)
    return attention.attend(0, query, *step.new).float()


@pytest.mark.parametrize("head_dim", [16, 24])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_attention(ours: AiterTritonKernels, rows: tuple[list[int], list[int]], head_dim: int) -> None:
    theirs, shape = TorchKernels(), KVShape(1, 2, head_dim)
    expected = attend(theirs, step(theirs, shape, rows), num_heads=6)
    found = attend(ours, step(ours, shape, rows), num_heads=6)
    assert float((found - expected).abs().max()) < BOUND


def test_a_long_context_in_parts(ours: AiterTritonKernels) -> None:
    """Beyond 512 positions AITER works on several parts of a context at once."""
    theirs, shape, rows = TorchKernels(), KVShape(1, 1, 16), ([530], [1])
    expected, found = (attend(kernels, step(kernels, shape, rows), num_heads=2) for kernels in (theirs, ours))
    assert float((found - expected).abs().max()) < BOUND


@pytest.mark.parametrize("window", [1, 9, None])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_windows_and_sinks(ours: AiterTritonKernels, rows: tuple[list[int], list[int]], window: int | None) -> None:
    def outputs(kernels: Kernels) -> Tensor:
        made = step(kernels, KVShape(1, 2, 16), rows)
        query, sinks = (tensor.to(kernels.placement.dtype) for tensor in (tensors(made.batch.num_tokens, 4, 16), tensors(4)))
        attention: WindowedAttention = kernels.windowed_attention(made.batch, made.pool)
        attention.store(0, *made.new)
        return attention.attend_window(0, query, sinks, window).float()

    assert float((outputs(ours) - outputs(TorchKernels())).abs().max()) < BOUND


@pytest.mark.parametrize(("head_dim", "rotated"), [(16, 16), (16, 8), (24, 24)])
def test_rotation_on_the_way_to_the_pool(ours: AiterTritonKernels, head_dim: int, rotated: int) -> None:
    """In AITER's kernel, or where that cannot (a part of each head, a size that is no power of two) in torch."""
    made = step(ours, KVShape(1, 2, head_dim), ROWS["mixed"])
    tokens, angles = made.batch.num_tokens, 7.0 * torch.rand(made.batch.num_tokens, rotated // 2)
    qk, rotation = tensors(tokens, 6, head_dim), (angles.cos(), angles.sin())
    expected = rotate_heads(qk, *rotation)
    attention = ours.paged_attention(made.batch, made.pool)
    assert isinstance(attention, TritonAttention)
    query, key = attention.rotate_and_store(0, qk.bfloat16(), made.new[1], rotation)
    assert float((torch.cat((query, key), dim=1).float() - expected).abs().max()) < BOUND
    slots = made.batch.slot_mapping
    assert torch.equal(made.pool.keys(0).flatten(0, 1)[slots], key)
    assert torch.equal(made.pool.values(0).flatten(0, 1)[slots], made.new[1])


@pytest.mark.each_arch
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_a_pool_of_8_bits(ours: AiterTritonKernels, rows: tuple[list[int], list[int]]) -> None:
    """A key or value is off by up to 2 ** -4 of itself. The pool's scales make the most of the few numbers."""
    library = ours._calls.library
    theirs, shape = TorchKernels(), KVShape(1, 2, 16)
    expected = attend(theirs, step(theirs, shape, rows), num_heads=4)
    found = attend(ours, step(ours, shape, rows, library.fp8), num_heads=4)
    assert float((found - expected).abs().max()) < 0.2 and float((found - expected).std()) < 0.04


@pytest.mark.each_arch
def test_rotation_into_a_pool_of_8_bits(ours: AiterTritonKernels) -> None:
    made = step(ours, KVShape(1, 2, 16), ROWS["mixed"], ours._calls.library.fp8)
    angles = 7.0 * torch.rand(made.batch.num_tokens, 8)
    attention = ours.paged_attention(made.batch, made.pool)
    assert isinstance(attention, TritonAttention)
    qk = tensors(made.batch.num_tokens, 6, 16).bfloat16()
    _, key = attention.rotate_and_store(0, qk, made.new[1], (angles.cos(), angles.sin()))
    slots, (key_scale, value_scale) = made.batch.slot_mapping, made.pool.scales[0]
    kept = made.pool.keys(0).flatten(0, 1)[slots].float() * key_scale
    assert float((kept - key.float()).abs().max()) < 2.0**-4 * float(key.abs().max())
    kept = made.pool.values(0).flatten(0, 1)[slots].float() * value_scale
    assert float((kept - made.new[1].float()).abs().max()) < 2.0**-4 * float(made.new[1].abs().max())


def latent(attention: PagedAttention, query: Tensor, step: Step, rank: int) -> Tensor:
    attention.store(0, *step.new)
    return attention.attend_latent(0, query, step.new[0], rank).float()


@pytest.mark.parametrize("piece", [2, 512])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_latent_attention(
    ours: AiterTritonKernels, monkeypatch: pytest.MonkeyPatch, rows: tuple[list[int], list[int]], piece: int
) -> None:
    """In one piece or in several, each context in one part or in two."""
    monkeypatch.setattr(triton_latent, "PIECE_QUERIES_MAX", piece)
    monkeypatch.setattr(triton_latent, "_PART_MIN", 16)
    monkeypatch.setattr(triton_latent, "_PROGRAMS", 16)

    def outputs(kernels: Kernels) -> Tensor:
        made = step(kernels, KVShape(1, 1, 48, num_planes=1), rows)
        query = tensors(made.batch.num_tokens, 4, 48).to(kernels.placement.dtype)
        return latent(kernels.paged_attention(made.batch, made.pool), query, made, 32)

    assert float((outputs(ours) - outputs(TorchKernels())).abs().max()) < BOUND


def test_a_latent_pool_of_8_bits_is_refused(ours: AiterTritonKernels) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype fp8.*latent attention"):
        step(ours, KVShape(1, 1, 48, num_planes=1), ROWS["decodes"], ours._calls.library.fp8)


@pytest.mark.parametrize("block_size", [8, 24])
def test_blocks_that_the_kernels_cannot_read_are_refused(ours: AiterTritonKernels, block_size: int) -> None:
    pool = KVPool(1, 4, block_size, 2, 16, ours.kv_store())
    driver = PagedDriver(None, pool)
    run = driver.start([0] * 4)
    run.table = driver.take_blocks(1)
    with pytest.raises(BlockSizeUnfit, match=f"block_size is {block_size}"):
        ours.paged_attention(build_batch([(run, 4)], block_size), pool)
