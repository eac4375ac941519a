"""Token embedding and the head that turns hidden states back into logits."""

import torch
from torch import Tensor
from torch.nn import functional

from model_worker.kernels.interface import Kernels
from model_worker.layers.share import Share
from model_worker.layers.weight_slot import WeightSlot


class Embedding:
    """One vector `[hidden_size]` per token id. Used backwards, as the head, it gives a logit per token id. Each rank has the vectors of some
    of the ids."""

    def __init__(self, kernels: Kernels, vocab_size: int, hidden_size: int) -> None:
        self._kernels = kernels
        self._share = Share.of_rank(vocab_size, kernels.group)
        self._weight = torch.empty(self._share.size, hidden_size)

    def __call__(self, ids: Tensor) -> Tensor:
        """Vectors `[T, hidden_size]` of int64 ids `[T]`."""
        if self._share.size == self._share.whole:
            return self._kernels.embedding(ids, self._weight)
        elsewhere = (ids < self._share.start) | (ids >= self._share.stop)
        mine = self._kernels.embedding((ids - self._share.start).masked_fill_(elsewhere, 0), self._weight)
        return self._kernels.group.all_reduce(mine.masked_fill_(elsewhere.unsqueeze(1), 0.0))

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits `[S, vocab_size]` of hidden states `[S, hidden_size]` on rank 0, which decides what is sampled; `[0, vocab_size]` on the others."""
        group, vocab_size = self._kernels.group, self._share.whole
        mine = self._kernels.linear(hidden, self._weight, None)
        if group.size == 1:
            return mine.float()
        sizes = [Share.of_part(vocab_size, rank, group.size).size for rank in range(group.size)]
        parts = group.gather(functional.pad(mine, (0, max(sizes) - len(self._weight))))
        if parts is None:
            return mine.new_empty(0, vocab_size, dtype=torch.float32)
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1).float()

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """Checkpoint name -> where it goes."""
        return {f"{prefix}.weight": self._share.slot(self._weight)}
