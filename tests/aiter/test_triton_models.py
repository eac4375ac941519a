"""Whole models on AITER's real Triton kernels, through the worker's engine, against the torch backend in float32.

This proves our layouts, slots, block tables and arguments, and the arithmetic of AITER's kernels; in the interpreter, so neither their speed nor
how a GPU's programs race.
"""

from dataclasses import replace

import pytest
import torch

from model_worker.kernels.aiter.library import AiterLibrary
from model_worker.kernels.aiter.triton_backend import AiterTritonKernels
from model_worker.kernels.quantization import Quantization
from model_worker.placement import Placement
from tests.aiter.model_pairs import worst_error
from tests.aiter.model_shapes import LLAMA, MORE_SHAPES, SHAPES
from tests.aiter.test_native_models import Rounding

BOUND = 0.15
"""Standard deviations of the logits. bfloat16 has 8 bits: a number is off by up to 0.2 %, a sum of products over two layers by a few per cent. Seen are
0.03 to 0.09; a window of one more position, a missing sink or expert, scores off by a tenth give 0.6 or more."""

FP8_BOUND = 0.7
"""8-bit floats have 3 bits behind the point: a number is off by up to 6 %. Seen are 0.27 with a cache of them, 0.44 with weights."""

KINDS = SHAPES | MORE_SHAPES


def kernels(arch: str, quantization: Quantization = Quantization.NONE) -> AiterTritonKernels:
    return AiterTritonKernels(AiterLibrary(arch), Placement(torch.device("cpu"), torch.bfloat16), quantization)


@pytest.mark.parametrize("name", KINDS)
def test_logits_are_those_of_the_torch_backend(name: str, arch: str) -> None:
    assert worst_error(KINDS[name], kernels(arch)) < BOUND


@pytest.mark.each_arch
def test_an_8_bit_cache(arch: str) -> None:
    assert worst_error(LLAMA, kernels(arch), AiterLibrary(arch).fp8) < FP8_BOUND


@pytest.mark.parametrize("quantization", [Quantization.FP8, Quantization.FP8_BLOCK])
def test_8_bit_weights(arch: str, quantization: Quantization) -> None:
    """Against torch with weights and what goes into them rounded alike. Where the two round a number to neighbours, they go apart by 6 % of it."""
    reference = Rounding(AiterLibrary(arch).fp8, None if quantization is Quantization.FP8 else 128)
    shape = replace(LLAMA, hidden_size=128, intermediate_size=128, num_heads=2, num_kv_heads=1, head_dim=64)
    assert worst_error(shape, kernels(arch, quantization), reference=reference) < FP8_BOUND
