"""Token embedding and the head that turns hidden states back into logits."""

import torch
from torch import Tensor

from model_worker.kernels.interface import Kernels
from model_worker.layers.weight_slot import WeightSlot


class Embedding:
    """One vector `[hidden_size]` per token id. Used backwards, as the head, it gives a logit per token id."""

    def __init__(self, kernels: Kernels, vocab_size: int, hidden_size: int) -> None:
        self._kernels = kernels
        self._weight = torch.empty(vocab_size, hidden_size)

    def __call__(self, ids: Tensor) -> Tensor:
        """Vectors `[T, hidden_size]` of int64 ids `[T]`."""
        return self._kernels.embedding(ids, self._weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[S, vocab_size]` of hidden states `[S, hidden_size]`."""
        return self._kernels.linear(hidden, self._weight, None)

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """Checkpoint name -> where it goes."""
        return {f"{prefix}.weight": WeightSlot(self._weight)}
