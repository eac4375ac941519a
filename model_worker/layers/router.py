"""Which experts each token goes through."""

from typing import Protocol

import torch
from torch import Tensor

from model_worker.kernels.interface import Kernels
from model_worker.layers.linear import Linear
from model_worker.layers.weight_slot import WeightSlot
from model_worker.models.experts_config import ExpertsConfig


class Router(Protocol):
    """Chooses for each token by itself."""

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """For `x` `[T, hidden_size]`: expert ids int64 `[T, num_chosen]`, each once per token, and their weights float32 `[T, num_chosen]`."""
        ...

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """Checkpoint name -> where it goes."""
        ...


class SoftmaxRouter:
    """The most probable experts by a softmax over all (arXiv:2401.04088, arXiv:2505.09388). `name` is the checkpoint's."""

    def __init__(
        self, kernels: Kernels, hidden_size: int, experts: ExpertsConfig, name: str = "gate", bias: bool = False
    ) -> None:
        self._kernels = kernels
        self._experts = experts
        self._gate = Linear(kernels, hidden_size, {name: experts.num_experts}, bias, is_exact=True)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._kernels.topk_softmax(self._gate(x), self._experts.num_chosen, self._experts.renormalize)

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        return self._gate.slots(prefix)


class SigmoidRouter:
    """DeepSeek-V3 (arXiv:2412.19437, section 2.1.2): a sigmoid per expert. A learned bias takes part in the choice, which is among the
    experts of the best groups, but not in the weights."""

    def __init__(self, kernels: Kernels, hidden_size: int, experts: ExpertsConfig) -> None:
        self._kernels = kernels
        self._experts = experts
        self._gate = Linear(kernels, hidden_size, {"gate": experts.num_experts}, is_exact=True)
        self._bias = torch.empty(experts.num_experts, dtype=torch.float32)  # in any model: it decides between near ties

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._kernels.biased_grouped_topk(self._gate(x), self._bias, self._experts)

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        return self._gate.slots(prefix) | {f"{prefix}.gate.e_score_correction_bias": WeightSlot(self._bias)}
