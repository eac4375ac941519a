"""The dense feed-forward layer: SwiGLU (arXiv:2002.05202)."""

from torch import Tensor

from model_worker.kernels.interface import Kernels
from model_worker.layers.linear import Linear
from model_worker.layers.weight_slot import WeightSlot


class MLP:
    """`down(silu(gate(x)) * up(x))`; gate and up are one product."""

    def __init__(self, kernels: Kernels, hidden_size: int, intermediate_size: int, bias: bool = False) -> None:
        self._kernels = kernels
        outputs = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self._gate_up_proj = Linear(kernels, hidden_size, outputs, bias)
        self._down_proj = Linear(kernels, intermediate_size, {"down_proj": hidden_size}, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """`x` and the result are `[T, hidden_size]`."""
        return self._down_proj(self._kernels.silu_and_mul(self._gate_up_proj(x)))

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """Checkpoint name -> where it goes."""
        return self._gate_up_proj.slots(prefix) | self._down_proj.slots(prefix)
