"""Rotary position embedding (RoFormer, arXiv:2104.09864): the angles, and which part of a head they turn; the kernel rotates."""

import torch
from torch import Tensor

from model_worker.kernels.interface import Kernels
from model_worker.layers.rope_scaling import RopeScaling, plain_frequencies

_KEPT_MIN, _KEPT_MAX = 1 << 10, 1 << 16
"""Positions whose angles are kept at first, and at most: 32 MiB for heads of 128."""


class RotaryEmbedding:
    """Angle of pair i at position p: p * theta ** (-2 i / dim), or as `scaling` has it, computed in float32 as transformers does. On a CPU those of the
    positions so far are kept: to look them up is two small operations in front of a pass instead of five."""

    def __init__(self, dim: int, theta: float, scaling: RopeScaling | None = None) -> None:
        self._frequencies = scaling.frequencies(dim, theta) if scaling else plain_frequencies(dim, theta)
        self._factor = scaling.attention_factor if scaling else 1.0
        self._kept = self._turned(torch.arange(0))

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 `[T, dim / 2]`, for int64 positions `[T]`."""
        if positions.device.type != "cpu" or not len(positions):
            return self._turned(positions)
        needed = int(positions.numpy().max()) + 1
        if needed > _KEPT_MAX:
            return self._turned(positions)
        if needed > len(self._kept[0]):
            self._kept = self._turned(torch.arange(max(_KEPT_MIN, 1 << (needed - 1).bit_length())))
        cos, sin = self._kept
        return cos.index_select(0, positions), sin.index_select(0, positions)

    def _turned(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions.float().unsqueeze(1) * self._frequencies
        if self._factor == 1.0:
            return angles.cos(), angles.sin()
        return angles.cos() * self._factor, angles.sin() * self._factor


def rotate(kernels: Kernels, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """`x` `[T, heads, head_dim]` with the first elements of every head rotated, as many as there are angles for."""
    dim = 2 * rotation[0].shape[1]
    if dim == x.shape[2]:
        return kernels.rotary_embedding(x, *rotation)
    return torch.cat((kernels.rotary_embedding(x[..., :dim], *rotation), x[..., dim:]), dim=2)
