"""A feed-forward layer of many experts, of which each token goes through a few."""

import torch
from torch import Tensor

from model_worker.kernels.interface import ExpertsSum, Kernels
from model_worker.layers.decoder import FeedForward
from model_worker.layers.expert_parallel import expert_share, over_peers
from model_worker.layers.mlp import MLP
from model_worker.layers.router import Router, SigmoidRouter, SoftmaxRouter
from model_worker.layers.weight_slot import WeightSlot, watched
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
    """The weighted sum of the chosen experts, each an MLP, and of those that all tokens share. `names`: see LLAMA_NAMES. Each rank has some of the
    experts, and a share of each shared one; all ranks of a worker choose alike."""

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
        self._share = expert_share(config.num_experts, kernels)
        size, count = config.intermediate_size, self._share.size
        # Stored [in, out] as in Linear; both read as the usual [out, in], gate above up.
        gate_up = torch.empty(count, hidden_size, 2 * size).transpose(1, 2)
        self._loaded: tuple[Tensor, Tensor] | None = gate_up, torch.empty(count, size, hidden_size).transpose(1, 2)
        self._sum: ExpertsSum | None = None
        self._shared = MLP(kernels, hidden_size, config.num_shared * size) if config.num_shared else None

    def __call__(self, x: Tensor) -> Tensor:
        """`x` and the result are `[T, hidden_size]`."""
        ids, weights = self._router(x)
        output = over_peers(self._kernels.peers, x, ids, weights, self._chosen)
        return self._kernels.group.all_reduce(output if self._shared is None else output + self._shared.partial(x))

    def _chosen(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if self._sum is None:
            self._hand_over()
            assert self._sum is not None
        return self._sum(x, ids - self._share.start, weights)

    def _hand_over(self) -> None:
        """When all are read, or at the first use, the kernels may take the weights over: from then on they cannot be loaded."""
        gate_up, down = self._weights
        self._sum = self._kernels.pack_experts(gate_up, down)
        if self._sum is None:
            self._sum = lambda x, ids, weights: self._kernels.experts(x, ids, weights, gate_up, down)
        else:
            self._loaded = None

    @property
    def _weights(self) -> tuple[Tensor, Tensor]:
        """Gate above up, and down, to load them into."""
        assert self._loaded is not None, "the kernels have taken these weights over"
        return self._loaded

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """Checkpoint name -> where it goes, expert by expert."""
        slots: dict[str, WeightSlot] = {}
        gate, up, down = self._names
        gate_up, down_weights = self._weights
        gate_weights, up_weights = gate_up.chunk(2, dim=1)
        for expert in range(self._share.whole):
            at = expert - self._share.start
            for kind, weight in ((gate, gate_weights), (up, up_weights), (down, down_weights)):
                view = weight[at] if 0 <= at < self._share.size else weight.new_empty(0, weight.shape[2])
                slots[f"{prefix}.experts.{expert}.{kind}.weight"] = WeightSlot(view, whole_size=weight.shape[1])
        slots = self._router.slots(prefix) | watched(slots, self._hand_over)
        return slots if self._shared is None else slots | self._shared.slots(f"{prefix}.shared_experts")
