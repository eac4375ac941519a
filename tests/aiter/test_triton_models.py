"""Whole models on AITER's real Triton kernels, through the worker's engine, against the torch backend in float32.

This proves our layouts, slots, block tables and arguments, and the arithmetic of AITER's kernels; in the interpreter, so neither their speed nor
how a GPU's programs race.
"""

import pytest
import torch

from model_worker.kernels.aiter.library import AiterLibrary
from model_worker.kernels.aiter.triton_backend import AiterTritonKernels
from model_worker.placement import Placement
from tests.aiter.model_pairs import worst_error
from tests.aiter.model_shapes import SHAPES

BOUND = 0.1
"""Standard deviations of the logits. bfloat16 has 8 bits: a number is off by up to 0.2 %, a sum of products over two layers by a few per cent."""


@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_those_of_the_torch_backend(name: str, arch: str) -> None:
    kernels = AiterTritonKernels(AiterLibrary(arch), Placement(torch.device("cpu"), torch.bfloat16))
    assert worst_error(SHAPES[name], kernels) < BOUND
