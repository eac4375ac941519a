"""Linear layers; several that read the same input are one product. Over several ranks each holds some rows of a weight, or some columns."""

from collections.abc import Mapping

import torch
from torch import Tensor

from model_worker.kernels.interface import Kernels, Product
from model_worker.layers.share import Share
from model_worker.layers.weight_slot import WeightSlot, watched


class _Weight:
    """`[out_features, in_features]`. Once it has been read, or at the first product, the kernels may take it over: from then on it cannot be
    loaded. `is_exact`: they may not."""

    def __init__(self, kernels: Kernels, in_features: int, out_features: int, is_exact: bool = False) -> None:
        self._kernels = kernels
        # Stored [in, out]: MKL multiplies a few rows by this layout up to a third faster. Reads as the usual [out, in].
        self._loaded: Tensor | None = torch.empty(in_features, out_features).t()
        self._product: Product | None = None
        self._is_exact = is_exact

    @property
    def view(self) -> Tensor:
        """To load it into."""
        assert self._loaded is not None, "the kernels have taken this weight over"
        return self._loaded

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x @ W.T + bias`."""
        return self.product(x, bias)

    @property
    def product(self) -> Product:
        """What multiplies; to ask for it is the first use."""
        if self._product is None:
            self._product = self._taken_over()
        return self._product

    def hand_over(self) -> None:
        """To be called when it has been read: where the kernels keep it in fewer bytes, no model is ever whole in float32."""
        self._product = self._taken_over()

    def _taken_over(self) -> Product:
        weight = self.view
        packed = None if self._is_exact else self._kernels.pack(weight)
        if packed is None:
            return lambda x, bias: self._kernels.linear(x, weight, bias)
        self._loaded = None
        return packed


class Linear:
    """`y = x @ W.T (+ b)` where W stacks the rows of one or more projections: `outputs` maps each one's name to its size, or to this rank's
    share of its rows (column parallel: each rank computes other columns of y).

    x is `[T, in_features]`, y `[T, sum of sizes]`, the projections side by side in the order given. `is_exact`: W stays as it was
    loaded, whatever the kernels do with others.
    """

    def __init__(
        self,
        kernels: Kernels,
        in_features: int,
        outputs: Mapping[str, int | Share],
        bias: bool = False,
        is_exact: bool = False,
    ) -> None:
        self._outputs = {name: Share.all_of(rows) if isinstance(rows, int) else rows for name, rows in outputs.items()}
        size = sum(rows.size for rows in self._outputs.values())
        self._weight = _Weight(kernels, in_features, size, is_exact)
        self._bias = torch.empty(size) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        return self._weight.multiply(x, self._bias)

    @property
    def parts(self) -> tuple[Product, Tensor | None]:
        """The product, and the bias that it is to be given."""
        return self._weight.product, self._bias

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """Checkpoint name -> where it goes: weight `[size, in_features]` and, with a bias, bias `[size]`."""
        slots = watched(self._parts(prefix, "weight", self._weight.view), self._weight.hand_over)
        return slots if self._bias is None else slots | self._parts(prefix, "bias", self._bias)

    def _parts(self, prefix: str, kind: str, whole: Tensor) -> dict[str, WeightSlot]:
        sizes = [rows.size for rows in self._outputs.values()]
        parts = zip(self._outputs.items(), whole.split_with_sizes(sizes), strict=True)
        return {f"{prefix}.{name}.{kind}": rows.slot(part) for (name, rows), part in parts}


class RowLinear:
    """One projection `y = x @ W.T (+ b)` of an input that is spread over the ranks: `inputs` is this rank's share of it, and of the columns of W
    (row parallel: each rank computes a part of the sum). Rank 0 adds the bias."""

    def __init__(self, kernels: Kernels, inputs: Share, name: str, out_features: int, bias: bool = False) -> None:
        self._kernels = kernels
        self._inputs = inputs
        self._name = name
        self._weight = _Weight(kernels, inputs.size, out_features)
        self._bias_share = Share(0, out_features if kernels.group.rank == 0 else 0, out_features)
        self._bias = torch.empty(self._bias_share.size) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, out_features]` of `x` `[T, size of the share]`."""
        return self._kernels.group.all_reduce(self.partial(x))

    @property
    def parts(self) -> tuple[Product, Tensor | None]:
        """As `Linear.parts`, of this rank's part of the sum."""
        return self._weight.product, self._bias if self._bias_share.size else None

    def partial(self, x: Tensor) -> Tensor:
        """This rank's part of the sum, `[T, out_features]`."""
        return self._weight.multiply(x, self._bias if self._bias_share.size else None)

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """Checkpoint name -> where it goes."""
        weight = {f"{prefix}.{self._name}.weight": self._inputs.slot(self._weight.view, dim=1)}
        slots = watched(weight, self._weight.hand_over)
        return slots if self._bias is None else slots | {f"{prefix}.{self._name}.bias": self._bias_share.slot(self._bias)}
