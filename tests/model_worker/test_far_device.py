"""A model on a device of its own never meets a tensor of the host, and gives what it gives on the host: shown on a device without hardware."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from model_worker.graphs.graphed_model import GraphedModel
from model_worker.graphs.padded_sizes import PaddedSizes
from model_worker.host_pool import HostPool
from model_worker.kernels.torch_backend import TorchKernels
from model_worker.kernels.torch_device_backend import TorchDeviceKernels
from model_worker.kv_pool import KVPool
from model_worker.models.causal_lm import CausalLM
from model_worker.placement import Placement
from tests.model_worker import random_llama
from tests.model_worker.far_device import FAR, FarRecorder, MixedDevices, NotRecordable, far, recording
from tests.model_worker.paged_driver import PagedDriver
from tests.model_worker.shaped_models import tiny_shapes

__all__ = ["far"]

PROMPTS = [[(7 * place + 3) % 199 for place in range(length)] for length in (19, 3, 34)]
PLACED = Placement(FAR, torch.float32)


@pytest.mark.usefixtures("far")
def test_the_device_is_one() -> None:
    there = torch.arange(3).to(FAR)
    assert there.device == FAR and there.cpu().tolist() == [0, 1, 2]
    with pytest.raises(MixedDevices):
        there + torch.arange(3)
    with pytest.raises(RuntimeError, match="numpy"):
        there.numpy()
    with recording():
        assert (there + 1).device == FAR
        for act in (there.cpu, there.tolist, there[0].item, lambda: torch.zeros(2).to(FAR), there.nonzero):
            with pytest.raises(NotRecordable):
                act()


@pytest.mark.parametrize("architecture", sorted(tiny_shapes()))
@pytest.mark.usefixtures("far")
def test_prompts_chunks_and_decodes_stay_on_the_device_and_decodes_can_be_recorded(architecture: str) -> None:
    """A recorded pass, padded to fixed sizes, asks the host for nothing once its batch lies on the device."""
    expected = generate(*made(architecture, TorchKernels()))
    model, kv = made(architecture, TorchDeviceKernels(placement=PLACED))
    assert generate(GraphedModel(model, kv, PaddedSizes((1, 4)), 48, FarRecorder()), kv) == expected


@pytest.mark.usefixtures("far")
def test_blocks_move_between_device_and_host() -> None:
    kv = KVPool(2, 5, 4, 2, 8, TorchKernels(placement=PLACED).kv_store())
    host = HostPool(kv, 3)
    first = torch.randn(2, 2, 2, 4, 8)
    kv.raw_block(1).copy_(first)
    kv.copy_blocks(np.array([[1, 3]], np.int32))
    host.swap_out(np.array([[3, 2]], np.int32))
    kv.zero_blocks(np.array([3, 1], np.int32))
    assert not kv.block(1).any() and not kv.block(3).any()
    host.swap_in(np.array([[2, 0]], np.int32))
    wanted = first.transpose(2, 3).numpy()
    assert np.array_equal(kv.block(0), wanted) and np.array_equal(host.block(2), wanted)


def made(architecture: str, kernels: TorchKernels) -> tuple[CausalLM, KVPool]:
    shape = tiny_shapes()[architecture]
    return random_llama.build(shape, kernels), KVPool.of_shape(shape.kv_shape, 40, 4, kernels.kv_store())


def generate(model: CausalLM, kv: KVPool) -> list[list[int]]:
    """In chunks, with a shared prefix, decodes beside them."""
    driver = PagedDriver(model, kv, chunk=16, prefix_caching=True)
    runs = [*driver.generate(PROMPTS, 3), *driver.generate([PROMPTS[2][:30]], 2)]
    return [run.outputs for run in runs]


@pytest.fixture(autouse=True, scope="module")
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield
