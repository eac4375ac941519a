"""AITER's Triton matrix products and quantization, in the interpreter, against float32."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from model_worker.kernels.aiter.triton_calls import Scaled, TritonCalls
from tests.aiter import references
from tests.aiter.references import error, normal

FP8_STEP = 2.0**-4
"""Rounding to 8 bits with 3 behind the point changes a number by this part of it at most."""


def product_error_max(size: int, has_bias: bool = False) -> float:
    """Results are normal with deviation `0.1 * sqrt(size)` below, sums are float32: rounding to bfloat16 is what errs, once more behind a bias."""
    return (1 + has_bias) * 0.02 * (size / 256) ** 0.5


@pytest.mark.parametrize(("tokens", "rows", "size"), [(1, 128, 256), (5, 96, 256), (40, 72, 512)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_product(tokens: int, rows: int, size: int, has_bias: bool, triton_calls: TritonCalls) -> None:
    x, weight = normal(tokens, size, seed=1), normal(rows, size, seed=2, scale=0.1)
    bias = normal(rows, seed=3) if has_bias else None
    expected = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    assert error(triton_calls.gemm(x, weight, bias), expected) < product_error_max(size, has_bias)


@pytest.mark.each_arch
def test_a_scale_for_each_token(triton_calls: TritonCalls) -> None:
    x = normal(4, 256, seed=1)
    found = triton_calls.quantize(x)
    assert found.values.dtype == triton_calls.library.fp8
    assert error(references.dequantized(found) / x.abs().amax(1, keepdim=True), x / x.abs().amax(1, keepdim=True)) < FP8_STEP


@pytest.mark.each_arch
def test_a_scale_for_each_128_elements(triton_calls: TritonCalls) -> None:
    x = normal(4, 384, seed=1)
    found = triton_calls.quantize_groups(x)
    assert found.scales.shape == (4, 3)
    largest = x.view(4, 3, 128).abs().amax(-1).repeat_interleave(128, 1)
    assert error(references.dequantized(found) / largest, x / largest) < FP8_STEP


def quantized(x: torch.Tensor, dtype: torch.dtype) -> Scaled:
    scales = x.float().abs().amax(1) / torch.finfo(dtype).max
    return Scaled((x.float() / scales[:, None]).to(dtype), scales)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.each_arch
def test_product_of_8_bit_floats(has_bias: bool, triton_calls: TritonCalls) -> None:
    fp8 = triton_calls.library.fp8
    x, weight = quantized(normal(5, 256, seed=1), fp8), quantized(normal(128, 256, seed=2, scale=0.1), fp8)
    bias = normal(128, seed=3) if has_bias else None
    expected = functional.linear(
        references.dequantized(x), references.dequantized(weight), None if bias is None else bias.float()
    )
    assert error(triton_calls.gemm_fp8(x, weight, bias, torch.bfloat16), expected) < product_error_max(256, has_bias)


@pytest.mark.each_arch
def test_product_of_8_bit_floats_in_blocks(triton_calls: TritonCalls) -> None:
    fp8 = triton_calls.library.fp8
    x = triton_calls.quantize_groups(normal(5, 256, seed=1))
    weight = normal(256, 256, seed=2, scale=0.1).float()
    scales = weight.view(2, 128, 2, 128).abs().amax((1, 3)) / torch.finfo(fp8).max
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    values = (weight / wide).to(fp8)
    expected = functional.linear(references.dequantized(x), values.float() * wide)
    found = triton_calls.gemm_fp8_block(x, Scaled(values, scales), torch.bfloat16)
    assert error(found, expected) < product_error_max(256)


@pytest.mark.each_arch
def test_product_of_8_bit_floats_in_blocks_whose_sums_are_split(
    triton_calls: TritonCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AITER splits some large sizes on gfx950, and joins the parts in a second kernel. Here it is made to split a small one."""
    from aiter.ops.triton import gemm_a8w8_blockscale

    chosen = gemm_a8w8_blockscale._get_config
    parts = {"NUM_KSPLIT": 2, "BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64}

    def split(*args: Any, **keywords: Any) -> Any:
        config = chosen(*args, **keywords)
        return config | parts if isinstance(config, dict) else (config[0] | parts, *config[1:])

    monkeypatch.setattr(gemm_a8w8_blockscale, "_get_config", split)
    test_product_of_8_bit_floats_in_blocks(triton_calls)
