"""Kernels take the weight of a linear layer over at its first product; those that decide something stay as they were loaded."""

import pytest
import torch
from torch import Tensor

from model_worker.kernels.interface import Product
from model_worker.kernels.torch_backend import TorchKernels
from model_worker.kv_pool import KVPool
from model_worker.layers.linear import Linear, RowLinear
from model_worker.layers.share import Share
from tests.model_worker.paged_driver import PagedDriver
from tests.model_worker.random_llama import build
from tests.model_worker.shaped_models import tiny_shapes


class Doubling(TorchKernels):
    """Keeps twice of each weight, and remembers which it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[Tensor] = []

    def pack(self, weight: Tensor) -> Product:
        self.taken.append(weight)
        twice = 2.0 * weight
        return lambda x, bias: self.linear(x, twice, bias)


@pytest.fixture
def kernels() -> Doubling:
    return Doubling()


@pytest.mark.parametrize("kind", ["columns", "rows"])
def test_a_weight_is_taken_over_once_when_it_has_been_loaded(kernels: Doubling, kind: str) -> None:
    linear = Linear(kernels, 3, {"p": 2}) if kind == "columns" else RowLinear(kernels, Share.all_of(3), "p", 2)
    loaded = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    linear.slots("layer")["layer.p.weight"].view.copy_(loaded)
    for _ in range(2):
        assert linear(torch.ones(1, 3)).tolist() == [[12.0, 30.0]]
    (taken,) = kernels.taken
    assert taken.equal(loaded)
    with pytest.raises(AssertionError, match="have taken this weight over"):
        linear.slots("layer")


def test_an_exact_weight_is_not_offered(kernels: Doubling) -> None:
    linear = Linear(kernels, 3, {"p": 2}, is_exact=True)
    linear.slots("layer")["layer.p.weight"].view.fill_(1.0)
    assert linear(torch.ones(1, 3)).tolist() == [[3.0, 3.0]]
    assert not kernels.taken and linear.slots("layer")


def test_routers_and_indexers_keep_their_weights(kernels: Doubling) -> None:
    """What they choose hangs on small differences."""
    shape = tiny_shapes()["DeepseekV32ForCausalLM"]
    model = build(shape, kernels)
    memory = {name: slot.view.untyped_storage().data_ptr() for name, slot in model.slots().items()}
    driver = PagedDriver(model, KVPool.of_shape(shape.kv_shape, 4, 16))
    driver.step([(driver.start([5, 6, 7]), 3)])
    taken = {weight.untyped_storage().data_ptr() for weight in kernels.taken}
    offered = {name.removeprefix("model.layers.2.") for name, pointer in memory.items() if pointer in taken and ".2." in name}
    attention = {f"self_attn.{name}.weight" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")}
    shared = {f"mlp.shared_experts.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")}
    assert offered == attention | shared
