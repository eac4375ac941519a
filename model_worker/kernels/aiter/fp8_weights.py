"""Weights in 8-bit floats, made once after loading, in torch. Scales are float32: a number stands for itself times its scale."""

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 128

_SCALE_MIN = 1e-12
"""Of rows and blocks of zeros."""


def quantized_rows(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Weight `[N, K]` in `dtype`, contiguous, with a scale per row, `[N]`."""
    scales = weight.abs().amax(dim=1).float().clamp(min=_SCALE_MIN) / torch.finfo(dtype).max
    return (weight.float() / scales.unsqueeze(1)).to(dtype).contiguous(), scales


def quantized_blocks(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Weight `[N, K]`, K a multiple of BLOCK, with a scale per BLOCK by BLOCK elements, `[ceil(N / BLOCK), K / BLOCK]`."""
    rows, columns = weight.shape
    padded = functional.pad(weight.float(), (0, 0, 0, -rows % BLOCK)).view(-1, BLOCK, columns // BLOCK, BLOCK)
    scales = padded.abs().amax(dim=(1, 3)).clamp(min=_SCALE_MIN) / torch.finfo(dtype).max
    values = (padded / scales[:, None, :, None]).to(dtype).view(-1, columns)[:rows]
    return values.contiguous(), scales
