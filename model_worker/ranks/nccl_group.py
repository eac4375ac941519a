"""A group of ranks on GPUs, joined by torch.distributed's nccl, which is RCCL in torch for ROCm."""

from typing import Any

import torch.distributed
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from model_worker.group import GroupBroken
from model_worker.ranks.torch_group import TorchGroup


class NcclGroup(TorchGroup):
    """See `TorchGroup`. Its calls are put in the queue of the device, where graphs record them too; they return before they have ended. So there is
    no second meeting: a graph would go on in the first group, and a rank that waits for another waits on its device."""

    def join(self, generation: int) -> None:
        """Meet the others. Raises GroupBroken, and so it does for every generation but the first."""
        if generation:
            raise GroupBroken(
                f"rank {self.rank} cannot meet the others again: a pass failed, and GPUs may still be in the middle of it"
            )
        super().join(generation)

    def gather(self, x: Tensor) -> Tensor | None:
        """See `Group`. Nccl gathers for all."""
        gathered = self.all_gather(x)
        return gathered if self.rank == 0 else None

    def _connect(self, store: Store) -> Any:
        if not torch.distributed.is_nccl_available():
            raise RuntimeError("this torch has no nccl")
        from torch.distributed.distributed_c10d import ProcessGroupNCCL  # not in every torch

        options: Any = ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        return ProcessGroupNCCL(store, self.rank, self.size, options)
