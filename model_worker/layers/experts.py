"""A feed-forward layer of many experts, of which each token goes through a few."""

import torch
from torch import Tensor

from model_worker.kernels.interface import Kernels
from model_worker.layers.decoder import FeedForward
from model_worker.layers.mlp import MLP
from model_worker.layers.router import Router, SigmoidRouter, SoftmaxRouter
from model_worker.layers.weight_slot import WeightSlot
from model_worker.models.experts_config import ExpertsConfig
from model_worker.models.model_config import ModelConfig

LLAMA_NAMES = ("gate_proj", "up_proj", "down_proj")
"""What most checkpoints call the three projections of an expert."""


def dense_or_experts(
    index: int, config: ModelConfig, kernels: Kernels, router: type[SigmoidRouter] | type[SoftmaxRouter]
) -> FeedForward:
    """The feed-forward part of layer `index`: experts where `config.experts` has them, and behind the last layer; else an MLP."""
    experts = config.experts
    if experts is None or (index < config.num_layers and index not in experts.layers):
        return MLP(kernels, config.hidden_size, config.intermediate_size)
    return Experts(kernels, config.hidden_size, experts, router(kernels, config.hidden_size, experts))


class Experts:
    """The weighted sum of the chosen experts, each an MLP, and of those that all tokens share. `names`: see LLAMA_NAMES."""

    def __init__(
        self,
        kernels: Kernels,
        hidden_size: int,
        config: ExpertsConfig,
        router: Router,
        names: tuple[str, str, str] = LLAMA_NAMES,
    ) -> None:
        self._kernels = kernels
        self._router = router
        self._names = names
        size, count = config.intermediate_size, config.num_experts
        # Stored [in, out] as in Linear; both read as the usual [out, in], gate above up.
        self._gate_up = torch.empty(count, hidden_size, 2 * size).transpose(1, 2)
        self._down = torch.empty(count, size, hidden_size).transpose(1, 2)
        self._shared = MLP(kernels, hidden_size, config.num_shared * size) if config.num_shared else None

    def __call__(self, x: Tensor) -> Tensor:
        """`x` and the result are `[T, hidden_size]`."""
        ids, weights = self._router(x)
        output = self._kernels.experts(x, ids, weights, self._gate_up, self._down)
        return output if self._shared is None else output + self._shared(x)

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """Checkpoint name -> where it goes, expert by expert."""
        slots = self._router.slots(prefix)
        gate, up, down = self._names
        for expert, (gate_up_weight, down_weight) in enumerate(zip(self._gate_up, self._down, strict=True)):
            gate_weight, up_weight = gate_up_weight.chunk(2)
            name = f"{prefix}.experts.{expert}"
            for kind, weight in ((gate, gate_weight), (up, up_weight), (down, down_weight)):
                slots[f"{name}.{kind}.weight"] = WeightSlot(weight)
        return slots if self._shared is None else slots | self._shared.slots(f"{prefix}.shared_experts")
