"""The native backend on a device of its own: it never mixes what lies there with what lies on the host, and its passes of decodes can be recorded,
down to AITER's declarations. The device is no hardware (`tests.model_worker.far_device`); the compiled code is torch's."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from model_worker.graphs.graphed_model import GraphedModel
from model_worker.graphs.padded_sizes import PaddedSizes
from model_worker.kernels.aiter.library import AiterLibrary
from model_worker.kernels.aiter.native_backend import AiterNativeKernels
from model_worker.kernels.aiter.native_calls import LatentRows, NativeCalls
from model_worker.kv_pool import KVPool
from model_worker.models.causal_lm import CausalLM
from model_worker.models.model_config import ModelConfig
from model_worker.placement import Placement
from tests.aiter.test_native_models import SHAPES
from tests.model_worker import random_llama
from tests.model_worker.far_device import FAR, FarRecorder, _FarTensor, far
from tests.model_worker.paged_driver import PagedDriver

__all__ = ["far"]

PROMPTS = [[(7 * place + 3) % 97 for place in range(length)] for length in (19, 3)]


class NearCalls(NativeCalls):
    """Calls which the device cannot carry as far as AITER's own code: its wrappers of tensors lose the mark of shuffled weights, and have no
    memory for Triton's interpreter to read. They are made with what stands behind the wrappers."""

    def shuffle_weight(self, weight: Tensor) -> Tensor:
        return _far(super().shuffle_weight(_near(weight)))

    def fused_moe(self, x: Tensor, weights: tuple[Tensor, Tensor], ids: Tensor, factors: Tensor, mask: Tensor | None) -> Tensor:
        return _far(super().fused_moe(*tree_map(_near, (x, weights, ids, factors, mask))))

    def mla_decode_fwd(self, query: Tensor, cache: Tensor, rows: LatentRows, scale: float) -> Tensor:
        near = LatentRows(
            _near(rows.starts), _near(rows.context_starts), _near(rows.slots), _near(rows.last_page), rows.queries_max
        )
        return _far(super().mla_decode_fwd(_near(query), _near(cache), near, scale))


def _near(leaf: Any) -> Any:
    return leaf.near if isinstance(leaf, Tensor) else leaf


def _far(near: Tensor) -> Tensor:
    with torch.inference_mode(False):
        return _FarTensor(near)


def made(shape: ModelConfig, kernels: AiterNativeKernels) -> tuple[CausalLM, KVPool]:
    return random_llama.build(shape, kernels), KVPool.of_shape(shape.kv_shape, 40, 16, kernels.kv_store())


def generate(model: CausalLM, kv: KVPool) -> list[list[int]]:
    """In chunks, with a shared prefix, decodes beside them."""
    driver = PagedDriver(model, kv, chunk=16, prefix_caching=True)
    runs = [*driver.generate(PROMPTS, 2), *driver.generate([PROMPTS[0][:18]], 2)]
    return [run.outputs for run in runs]


@pytest.mark.parametrize("name", ["Llama", "Qwen3-MoE", "DeepSeek-V3"])
@pytest.mark.usefixtures("far")
def test_tokens_are_those_of_the_host_and_decodes_are_replayed(name: str, arch: str) -> None:
    shape = SHAPES[name][0]
    library = AiterLibrary(arch)
    expected = generate(*made(shape, AiterNativeKernels(library, Placement(torch.device("cpu"), torch.bfloat16))))
    kernels = AiterNativeKernels(library, Placement(FAR, torch.bfloat16))
    if name != "Llama":
        kernels._calls = NearCalls(library)
    model, kv = made(shape, kernels)
    assert generate(GraphedModel(model, kv, PaddedSizes((1, 4)), 48, FarRecorder()), kv) == expected


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield
