"""Rotary position embedding (RoFormer, arXiv:2104.09864), angles only; the kernel rotates."""

import torch
from torch import Tensor


class RotaryEmbedding:
    """Angle of pair i at position p: p * theta ** (-2 i / head_dim), computed in float32 as transformers does."""

    def __init__(self, head_dim: int, theta: float) -> None:
        self._inverse_frequencies = 1.0 / (theta ** (torch.arange(0, head_dim, 2).float() / head_dim))

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 `[T, head_dim / 2]`, for int64 positions `[T]`."""
        angles = positions.float().unsqueeze(1) * self._inverse_frequencies
        return angles.cos(), angles.sin()
