"""The ranks of a model on AMD GPUs, whose sums AITER computes: by a kernel of its own over memory that the GPUs share, or else by RCCL."""

from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from model_worker.group import GroupBroken
from model_worker.kernels.aiter.library import AiterFunction, AiterLibrary
from model_worker.kernels.aiter.probe import Machine
from model_worker.ranks.nccl_group import NcclGroup


class AiterGroup(NcclGroup):
    """See `NcclGroup`. Rank i has GPU i of this machine. AITER has one group of ranks in a process, so there is one of these. What is not a
    sum goes through RCCL itself, and sums too where AITER has no compiled kernels."""

    _meeting: Path
    _sum: AiterFunction | None = None

    @classmethod
    def at_file(cls, store: Path, rank: int, size: int) -> Self:
        made = super().at_file(store, rank, size)
        made._meeting = store.with_name(f"{store.name}.aiter")
        return made

    def join(self, generation: int) -> None:
        """Meet the others. Raises GroupBroken, AiterUnavailable."""
        super().join(generation)
        library = self._library()
        if not Machine.of(library).has_native_kernels:
            return
        try:
            library.function("aiter", "init_dist_env")(
                tensor_model_parallel_size=self.size,
                rankID=self.rank,
                distributed_init_method=f"file://{self._meeting}",
                local_rank=self.rank,
            )
            coordinator: Any = library.function("aiter.dist.parallel_state", "get_tp_group")()
        except (RuntimeError, AttributeError) as error:  # the latter where it takes GPUs for joined that are not
            raise GroupBroken(
                f"rank {self.rank} cannot join the others in AITER ({error}): kernels aiter-triton join them without it"
            ) from error
        self._sum = AiterFunction("GroupCoordinator.all_reduce", coordinator.all_reduce, None)

    def leave(self) -> None:
        """AITER's own group stays until the process ends: to take it apart the ranks would have to wait for each other."""
        self._sum = None
        super().leave()

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._sum is None:
            return super().all_reduce(x)
        try:
            total: Tensor = self._sum(input_=x.contiguous())
        except RuntimeError as error:
            raise GroupBroken(f"rank {self.rank} cannot add to the others: {error}") from error
        return total

    def _library(self) -> AiterLibrary:
        return AiterLibrary.for_device(torch.device("cuda", self.rank))
