"""Recorded decodes on the Triton flavour equal those computed anew, and need the host for nothing: no tensor of the host goes into a kernel of
AITER, none of the device comes back. On a device without hardware, AITER's real kernels being interpreted."""

import pytest
import torch
from torch import Tensor

from model_worker.graphs.graphed_model import GraphedModel
from model_worker.graphs.padded_sizes import PaddedSizes
from model_worker.kernels.aiter.triton_backend import AiterTritonKernels
from model_worker.kv_pool import KVPool
from model_worker.models.causal_lm import CausalLM
from model_worker.models.model_config import ModelConfig
from model_worker.placement import Placement
from tests.aiter.far_library import FarLibrary
from tests.aiter.model_shapes import MORE_SHAPES, SHAPES
from tests.model_worker import random_llama
from tests.model_worker.far_device import FAR, FarRecorder, far
from tests.model_worker.paged_driver import PagedDriver

__all__ = ["far"]

KINDS = SHAPES | MORE_SHAPES
PROMPTS = [[9, 4, 77], [31, 8, 62, 5]]


def decoded(model: CausalLM, kv: KVPool) -> Tensor:
    """Logits of both prompts, then of decodes."""
    driver = PagedDriver(model, kv)
    runs = [driver.start([*prompt, 7]) for prompt in PROMPTS]
    logits = [driver.step([(run, len(run.ids) - 1) for run in runs])]
    return torch.cat([*logits, driver.step([(run, 1) for run in runs])]).cpu()


def made(shape: ModelConfig, arch: str) -> tuple[CausalLM, KVPool]:
    kernels = AiterTritonKernels(FarLibrary(arch), Placement(FAR, torch.bfloat16))
    return random_llama.build(shape, kernels), KVPool.of_shape(shape.kv_shape, 4, 16, kernels.kv_store())


@pytest.mark.parametrize("kind", ["gpt-oss", "DeepSeek-V3", "DeepSeek-V3.2"])
@pytest.mark.usefixtures("far")
def test_replayed_decodes_equal_those_computed_anew(kind: str, arch: str) -> None:
    """Windows, sinks and experts; lists of slots; chosen positions. Padded by two rows, at a bound of 32 positions."""
    with torch.no_grad():
        expected = decoded(*made(KINDS[kind], arch))
        model, kv = made(KINDS[kind], arch)
        found = decoded(GraphedModel(model, kv, PaddedSizes((4,)), 32, FarRecorder()), kv)
    assert float((found - expected).abs().max()) < 0.02 * float(expected.std())
