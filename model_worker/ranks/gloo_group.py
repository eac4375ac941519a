"""A group of ranks on CPUs, joined by torch.distributed's gloo."""

from typing import Any

from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroupGloo, Store

from model_worker.ranks.torch_group import TorchGroup, sum_in_order


class GlooGroup(TorchGroup):
    """See `TorchGroup`."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Adds in the order of the ranks, so that an element's bits do not depend on its neighbours in `x`: gloo's own sum begins at another
        rank for each part of `x`, which does not matter to a sum of two."""
        return sum_in_order(self.all_gather(x)) if self.size > 2 else super().all_reduce(x)

    def _connect(self, store: Store) -> Any:
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # as torch.distributed makes them
        options._timeout = self._timeout
        options._devices = [
            ProcessGroupGloo.create_default_device()
            if self._interface is None
            else ProcessGroupGloo.create_device(hostname=self._interface)
        ]
        return ProcessGroupGloo(store, self.rank, self.size, options)
