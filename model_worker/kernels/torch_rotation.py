"""Rotation of a part of each head, in torch."""

import torch
from torch import Tensor


def rotate_heads(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` `[T, heads, head_dim]` with the first n elements of every head rotated, element i paired with i + n / 2 (NeoX style), computed in float32.
    cos and sin float32 `[T, n / 2]`."""
    size = cos.shape[1]
    first, second, rest = x.split_with_sizes((size, size, x.shape[2] - 2 * size), dim=2)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=2).to(x.dtype)
    return torch.cat((turned, rest), dim=2)
