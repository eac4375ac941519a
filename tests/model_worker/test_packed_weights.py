"""Kernels take the weight of a linear layer over when it has been read, or at its first product; those that decide something stay as they were
loaded."""

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from model_worker.kernels.interface import ExpertsSum, Product, Table
from model_worker.kernels.torch_backend import TorchKernels
from model_worker.kv_pool import KVPool
from model_worker.layers.linear import Linear, RowLinear
from model_worker.layers.share import Share
from model_worker.layers.weight_slot import WeightSlot
from model_worker.models.registry import build_model
from model_worker.weights.model_source import fill
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


class Forgetting(TorchKernels):
    """Keeps nothing of what it is given, and knows how many of those are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[StorageWeakRef] = []

    @property
    def num_alive(self) -> int:
        return sum(not storage.expired() for storage in self.storages)

    def pack(self, weight: Tensor) -> Product:
        self.storages.append(StorageWeakRef(weight.untyped_storage()))
        return lambda x, bias: x

    def pack_table(self, weight: Tensor) -> Table:
        self.pack(weight)
        return _Nothing()

    def pack_experts(self, gate_up: Tensor, down: Tensor) -> ExpertsSum:
        self.pack(gate_up)
        self.pack(down)
        return lambda x, ids, weights: x


class _Nothing(Table):
    def rows(self, ids: Tensor) -> Tensor:
        return ids

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("architecture", "taken"),
    [
        ("LlamaForCausalLM", 2 + 3 * 4),
        ("MixtralForCausalLM", 2 + 3 * (2 + 2)),
        ("DeepseekV32ForCausalLM", 2 + 4 * 3 + 2 + 2 * (2 + 2)),
    ],
)
def test_what_is_read_is_taken_over_before_much_more_is_read(architecture: str, taken: int) -> None:
    """So no model is ever whole in float32 where the kernels keep it in less."""
    kernels = Forgetting()
    shape = tiny_shapes()[architecture]
    most = 0

    def read(name: str, slot: WeightSlot) -> None:
        nonlocal most
        most = max(most, kernels.num_alive)

    slots = build_model(shape, kernels).slots()
    fill(slots, set(slots), read, "m", shape)
    assert len(kernels.storages) == taken and not slots
    assert (most, kernels.num_alive) == (0, 0)
