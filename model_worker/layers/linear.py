"""Linear layers; several that read the same input are one product. Over several ranks each holds some rows of a weight, or some columns."""

from collections.abc import Mapping

import torch
from torch import Tensor

from model_worker.kernels.interface import Kernels
from model_worker.layers.share import Share
from model_worker.layers.weight_slot import WeightSlot


class Linear:
    """`y = x @ W.T (+ b)` where W stacks the rows of one or more projections: `outputs` maps each one's name to its size, or to this rank's
    share of its rows (column parallel: each rank computes other columns of y).

    x is `[T, in_features]`, y `[T, sum of sizes]`, the projections side by side in the order given. Weights are float32.
    """

    def __init__(self, kernels: Kernels, in_features: int, outputs: Mapping[str, int | Share], bias: bool = False) -> None:
        self._kernels = kernels
        self._outputs = {name: Share.all_of(rows) if isinstance(rows, int) else rows for name, rows in outputs.items()}
        size = sum(rows.size for rows in self._outputs.values())
        # Stored [in, out]: MKL multiplies a few rows by this layout up to a third faster. Reads as the usual [out, in].
        self._weight = torch.empty(in_features, size).t()
        self._bias = torch.empty(size) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.linear(x, self._weight, self._bias)

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """Checkpoint name -> where it goes: weight `[size, in_features]` and, with a bias, bias `[size]`."""
        sizes = [rows.size for rows in self._outputs.values()]
        stacked = {"weight": self._weight} if self._bias is None else {"weight": self._weight, "bias": self._bias}
        return {
            f"{prefix}.{name}.{kind}": rows.slot(part)
            for kind, whole in stacked.items()
            for (name, rows), part in zip(self._outputs.items(), whole.split_with_sizes(sizes), strict=True)
        }


class RowLinear:
    """One projection `y = x @ W.T (+ b)` of an input that is spread over the ranks: `inputs` is this rank's share of it, and of the columns of W
    (row parallel: each rank computes a part of the sum). Rank 0 adds the bias."""

    def __init__(self, kernels: Kernels, inputs: Share, name: str, out_features: int, bias: bool = False) -> None:
        self._kernels = kernels
        self._inputs = inputs
        self._name = name
        self._weight = torch.empty(inputs.size, out_features).t()  # as in Linear
        self._bias_share = Share(0, out_features if kernels.group.rank == 0 else 0, out_features)
        self._bias = torch.empty(self._bias_share.size) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, out_features]` of `x` `[T, size of the share]`."""
        return self._kernels.group.all_reduce(self.partial(x))

    def partial(self, x: Tensor) -> Tensor:
        """This rank's part of the sum, `[T, out_features]`."""
        return self._kernels.linear(x, self._weight, self._bias if self._bias_share.size else None)

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """Checkpoint name -> where it goes."""
        slots = {f"{prefix}.{self._name}.weight": self._inputs.slot(self._weight, dim=1)}
        return slots if self._bias is None else slots | {f"{prefix}.{self._name}.bias": self._bias_share.slot(self._bias)}
