"""Whole models on AITER's compiled kernels, through the worker's engine, against the torch backend in float32. torch stands in for the compiled
code, behind AITER's own declarations.

This proves our layouts, slots, block tables, arguments and shuffled weights, and nothing of the arithmetic of the compiled kernels: none has run here.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from model_worker.kernels.aiter import native_rows
from model_worker.kernels.aiter.fp8_weights import quantized_blocks, quantized_rows
from model_worker.kernels.aiter.library import AiterLibrary
from model_worker.kernels.aiter.native_backend import AiterNativeKernels
from model_worker.kernels.interface import Product
from model_worker.kernels.quantization import Quantization
from model_worker.kernels.torch_backend import TorchKernels
from model_worker.models.latent_config import LatentConfig
from model_worker.models.model_config import ModelConfig
from model_worker.placement import Placement
from tests.aiter.compiled_modules import Call
from tests.aiter.model_pairs import PagedDriver, worst_error
from tests.aiter.model_shapes import DEEPSEEK_V3, LLAMA, QWEN3_MOE

BOUND = 0.1
"""Standard deviations of the logits, as for the Triton kernels: what bfloat16 costs over two layers."""

FP8_BOUND = 0.5
"""8-bit floats have 4 bits: of a cache the largest error, of weights and what they multiply the root mean square, which is 1.4 where nothing is right."""

# Heads, latents and blocks of the sizes that the compiled kernels are made for.
SHAPES: dict[str, tuple[ModelConfig, set[str]]] = {
    "Llama": (replace(LLAMA, head_dim=128), {"pa_fwd_asm", "fmha_v3_varlen_fwd", "reshape_and_cache", "silu_and_mul"}),
    "GLM-4's partly rotated heads": (replace(LLAMA, head_dim=128, rotary_dim=64), {"rope_cached_positions_fwd_impl"}),
    "Qwen3-MoE": (replace(QWEN3_MOE, head_dim=128), {"topk_softmax", "ck_moe_stage1", "ck_moe_stage2"}),
    "DeepSeek-V3": (
        replace(DEEPSEEK_V3, latent=LatentConfig(32, 512, 16, 64, 16, is_interleaved=True)),
        {"mla_decode_stage1_asm_fwd", "mla_prefill_asm_fwd", "concat_and_cache_mla", "biased_grouped_topk"},
    ),
}


def kernels(arch: str, quantization: Quantization = Quantization.NONE) -> AiterNativeKernels:
    return AiterNativeKernels(AiterLibrary(arch), Placement(torch.device("cpu"), torch.bfloat16), quantization)


@pytest.fixture(params=[8, 1])
def few_queries(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """With 1, chunks and drafts of a few tokens take the way of longer ones, one row at a time: FlashAttention over a copied context."""
    monkeypatch.setattr(native_rows, "FEW_QUERIES", request.param)
    monkeypatch.setattr(native_rows, "COPIED_MAX", 20)
    return int(request.param)


@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_those_of_the_torch_backend(name: str, arch: str, recorded_calls: list[Call], few_queries: int) -> None:
    shape, operators = SHAPES[name]
    assert worst_error(shape, kernels(arch)) < BOUND
    called = Counter(call.operator for call in recorded_calls)
    assert operators | {"rmsnorm2d_fwd_with_add"} <= set(called)
    # Of the conversation's rows one has more than 8 tokens, and three more have several; each goes through two layers.
    assert called["fmha_v3_varlen_fwd"] + called["mla_prefill_asm_fwd"] == 2 * (1 if few_queries == 8 else 4)


@pytest.mark.each_arch
def test_an_eight_bit_cache(arch: str, few_queries: int) -> None:
    shape, _ = SHAPES["Llama"]
    assert worst_error(shape, kernels(arch), AiterLibrary(arch).fp8) < FP8_BOUND


class Rounding(TorchKernels):
    """torch in float32, with the weights of linear layers and what goes into them rounded to 8-bit floats."""

    def __init__(self, dtype: torch.dtype, group_size: int | None) -> None:
        super().__init__()
        self._dtype, self._size = dtype, group_size

    def pack(self, weight: Tensor) -> Product:
        if self._size is None:
            values, scales = quantized_rows(weight, self._dtype)
            rounded = values.float() * scales[:, None]
        else:
            values, scales = quantized_blocks(weight, self._dtype)
            rounded = values.float() * scales.repeat_interleave(self._size, 0).repeat_interleave(self._size, 1)

        def product(x: Tensor, bias: Tensor | None) -> Tensor:
            groups = x.reshape(-1, self._size or x.shape[1])
            values, scales = quantized_rows(groups, self._dtype)
            return functional.linear((values.float() * scales[:, None]).view(x.shape), rounded, bias)

        return product


@pytest.mark.each_arch
@pytest.mark.parametrize("quantization", [Quantization.FP8, Quantization.FP8_BLOCK])
def test_eight_bit_weights(arch: str, quantization: Quantization, recorded_calls: list[Call]) -> None:
    shape = replace(SHAPES["Llama"][0], hidden_size=256, intermediate_size=256)
    reference = Rounding(AiterLibrary(arch).fp8, None if quantization is Quantization.FP8 else 128)
    expected = PagedDriver(shape, reference).conversation()
    found = PagedDriver(shape, kernels(arch, quantization)).conversation()
    assert float((found - expected).square().mean().sqrt() / expected.std()) < FP8_BOUND
    product = "gemm_a8w8_bpreshuffle" if quantization is Quantization.FP8 else "gemm_a8w8_blockscale"
    assert product in {call.operator for call in recorded_calls}
