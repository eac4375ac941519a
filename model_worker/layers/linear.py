"""Linear layers; several that read the same input are one product."""

import torch
from torch import Tensor

from model_worker.kernels.interface import Kernels
from model_worker.layers.weight_slot import WeightSlot


class Linear:
    """`y = x @ W.T (+ b)` where W stacks the rows of one or more projections: `outputs` maps each one's name to its size.

    x is `[T, in_features]`, y `[T, sum of sizes]`, the projections side by side in the order given. Weights are float32.
    """

    def __init__(self, kernels: Kernels, in_features: int, outputs: dict[str, int], bias: bool = False) -> None:
        self._kernels = kernels
        self._outputs = outputs
        size = sum(outputs.values())
        # Stored [in, out]: MKL multiplies a few rows by this layout up to a third faster. Reads as the usual [out, in].
        self._weight = torch.empty(in_features, size).t()
        self._bias = torch.empty(size) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.linear(x, self._weight, self._bias)

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """Checkpoint name -> where it goes: weight `[size, in_features]` and, with a bias, bias `[size]`."""
        sizes = list(self._outputs.values())
        names = [f"{prefix}.{name}" for name in self._outputs]
        stacked = {"weight": self._weight} if self._bias is None else {"weight": self._weight, "bias": self._bias}
        return {
            f"{name}.{kind}": WeightSlot(part)
            for kind, rows in stacked.items()
            for name, part in zip(names, rows.split_with_sizes(sizes), strict=True)
        }
