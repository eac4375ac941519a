"""Root mean square normalisation."""

import torch
from torch import Tensor

from model_worker.kernels.interface import Kernels
from model_worker.layers.weight_slot import WeightSlot


class RMSNorm:
    """Scales each vector to unit root mean square, then by a weight `[size]`."""

    def __init__(self, kernels: Kernels, size: int, eps: float) -> None:
        self._kernels = kernels
        self._weight = torch.empty(size)
        self._eps = eps

    @property
    def weight(self) -> Tensor:
        """`[size]`."""
        return self._weight

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, self._weight, self._eps)

    def added(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of `residual + x`, and that sum."""
        return self._kernels.add_rms_norm(x, residual, self._weight, self._eps)

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """Checkpoint name -> where it goes."""
        return {f"{prefix}.weight": WeightSlot(self._weight)}
