"""The dense feed-forward layer: SwiGLU (arXiv:2002.05202)."""

from torch import Tensor

from model_worker.kernels.interface import Kernels
from model_worker.layers.linear import Linear, RowLinear
from model_worker.layers.share import Share
from model_worker.layers.weight_slot import WeightSlot


class MLP:
    """`down(silu(gate(x)) * up(x))`; gate and up are one product. Each rank has some of the `intermediate_size` elements."""

    def __init__(self, kernels: Kernels, hidden_size: int, intermediate_size: int, bias: bool = False) -> None:
        self._kernels = kernels
        share = Share.of_rank(intermediate_size, kernels.group)
        self._gate_up_proj = Linear(kernels, hidden_size, {"gate_proj": share, "up_proj": share}, bias)
        self._down_proj = RowLinear(kernels, share, "down_proj", hidden_size, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """`x` and the result are `[T, hidden_size]`."""
        return self._down_proj(self._inner(x))

    def partial(self, x: Tensor) -> Tensor:
        """This rank's part of the result; the sum over the ranks is all of it."""
        return self._down_proj.partial(self._inner(x))

    @property
    def parts(self) -> tuple[Linear, RowLinear]:
        """gate and up, and down."""
        return self._gate_up_proj, self._down_proj

    def _inner(self, x: Tensor) -> Tensor:
        return self._kernels.silu_and_mul(self._gate_up_proj(x))

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """Checkpoint name -> where it goes."""
        return self._gate_up_proj.slots(prefix) | self._down_proj.slots(prefix)
