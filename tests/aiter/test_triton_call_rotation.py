"""AITER's Triton rotation, alone and with the write to the cache, in the interpreter, against float32."""

import pytest
import torch
from torch import Tensor

from model_worker.kernels.aiter.triton_calls import KVCache, TritonCalls
from tests.aiter import references
from tests.aiter.references import error, normal

ROTATION_ERROR_MAX = 0.02
"""Half a step of bfloat16 at 4 is 0.0078; cos and sin are rounded too, as they are for the reference, and so are products."""

FP8_ERROR_MAX = 0.15
"""Half a step of an 8-bit float at 4 is 0.125, at 2 0.0625; on top of the rotation's."""

HEADS, KV_HEADS, SIZE, BLOCK_SIZE = 2, 1, 32, 16
POSITIONS = torch.tensor([0, 7, 100])
SLOTS = torch.tensor([33, -1, 5])
"""The second token has no place in the cache."""


@pytest.mark.parametrize("rotated_size", [32, 16])
def test_rotation_of_the_first_elements(rotated_size: int, triton_calls: TritonCalls) -> None:
    x = normal(3, HEADS, SIZE, seed=1)
    cos, sin = references.rotation(POSITIONS, rotated_size)
    before = x.clone()
    found = triton_calls.rotate(x, cos, sin)
    assert error(found, references.rotated(x, cos, sin)) < ROTATION_ERROR_MAX
    assert torch.equal(x, before)


def written(triton_calls: TritonCalls, dtype: torch.dtype, scale: float) -> tuple[tuple[Tensor, Tensor], KVCache, list[Tensor]]:
    """Rotated query and key, the cache, and query, key and value as they came."""
    shapes = ((3, HEADS, SIZE), (3, KV_HEADS, SIZE), (3, KV_HEADS, SIZE))
    query, key, value = (normal(*shape, seed=seed) for seed, shape in enumerate(shapes))
    planes = [torch.zeros(4, BLOCK_SIZE, KV_HEADS, SIZE, dtype=dtype) for _ in range(2)]
    cache = KVCache(*planes, torch.tensor([scale]), torch.tensor([scale / 2]))
    rotation = references.rotation(POSITIONS, SIZE)
    rotated = triton_calls.rotate_and_cache((query.clone(), key.clone(), value), cache, SLOTS, rotation)
    return rotated, cache, [query, key, value]


def check(found: tuple[tuple[Tensor, Tensor], KVCache, list[Tensor]], bound: float) -> None:
    rotated, cache, (query, key, value) = found
    cos, sin = references.rotation(POSITIONS, SIZE)
    assert error(rotated[0], references.rotated(query, cos, sin)) < ROTATION_ERROR_MAX
    kept = SLOTS >= 0  # a key without a place in the cache is not even rotated
    assert error(rotated[1][kept], references.rotated(key, cos, sin)[kept]) < ROTATION_ERROR_MAX
    scales = (float(cache.key_scale), float(cache.value_scale)) if cache.is_scaled else (1.0, 1.0)
    keys, values = (
        plane.flatten(0, 1).float() * scale for plane, scale in zip((cache.keys, cache.values), scales, strict=True)
    )
    assert error(keys[SLOTS[kept]], references.rotated(key, cos, sin)[kept]) < bound
    assert error(values[SLOTS[kept]], value[kept]) < bound
    others = torch.ones(len(keys), dtype=torch.bool)
    others[SLOTS[kept]] = False
    assert not keys[others].any() and not values[others].any()


def test_rotation_and_write(triton_calls: TritonCalls) -> None:
    check(written(triton_calls, torch.bfloat16, 1.0), ROTATION_ERROR_MAX)


@pytest.mark.each_arch
def test_rotation_and_write_to_8_bit_floats(triton_calls: TritonCalls) -> None:
    check(written(triton_calls, triton_calls.library.fp8, 0.5), FP8_ERROR_MAX)
