"""Token embedding and the head that turns hidden states back into logits."""

import torch
from torch import Tensor
from torch.nn import functional

from model_worker.kernels.interface import Kernels, Table
from model_worker.layers.share import Share
from model_worker.layers.weight_slot import WeightSlot, watched


class _Plain(Table):
    """A weight as it was loaded."""

    def __init__(self, kernels: Kernels, weight: Tensor) -> None:
        self._kernels = kernels
        self._weight = weight

    def rows(self, ids: Tensor) -> Tensor:
        return self._kernels.embedding(ids, self._weight)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._kernels.linear(x, self._weight, bias)


class Embedding:
    """One vector `[hidden_size]` per token id. Used backwards, as the head, it gives a logit per token id. Each rank has the vectors of some
    of the ids."""

    def __init__(self, kernels: Kernels, vocab_size: int, hidden_size: int) -> None:
        self._kernels = kernels
        self._share = Share.of_rank(vocab_size, kernels.group)
        self._loaded: Tensor | None = torch.empty(self._share.size, hidden_size)
        self._table: Table | None = None

    def __call__(self, ids: Tensor) -> Tensor:
        """Vectors `[T, hidden_size]` of int64 ids `[T]`."""
        if self._share.size == self._share.whole:
            return self._used.rows(ids)
        elsewhere = (ids < self._share.start) | (ids >= self._share.stop)
        mine = self._used.rows((ids - self._share.start).masked_fill_(elsewhere, 0))
        return self._kernels.group.all_reduce(mine.masked_fill_(elsewhere.unsqueeze(1), 0.0))

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits `[S, vocab_size]` of hidden states `[S, hidden_size]` on rank 0, which decides what is sampled; `[0, vocab_size]` on the others."""
        group, vocab_size = self._kernels.group, self._share.whole
        mine = self._used(hidden, None)
        if group.size == 1:
            return mine.float()
        sizes = [Share.of_part(vocab_size, rank, group.size).size for rank in range(group.size)]
        parts = group.gather(functional.pad(mine, (0, max(sizes) - self._share.size)))
        if parts is None:
            return mine.new_empty(0, vocab_size, dtype=torch.float32)
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1).float()

    @property
    def _used(self) -> Table:
        if self._table is None:
            self._hand_over()
            assert self._table is not None
        return self._table

    def _hand_over(self) -> None:
        """When it has been read, or at the first use, the kernels may take the weight over: from then on it cannot be loaded."""
        assert self._loaded is not None
        packed = self._kernels.pack_table(self._loaded)
        self._table = packed or _Plain(self._kernels, self._loaded)
        if packed is not None:
            self._loaded = None

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """Checkpoint name -> where it goes."""
        assert self._loaded is not None, "the kernels have taken this weight over"
        return watched({f"{prefix}.weight": self._share.slot(self._loaded)}, self._hand_over)
