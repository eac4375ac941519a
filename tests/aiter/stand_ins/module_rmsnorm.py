"""Norms over the last dimension. Sums in float32; results in the input's dtype, as the compiled ones."""

import torch
from torch import Tensor


def _normed(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * weight.float()).to(x.dtype)


def rmsnorm2d_fwd(input: Tensor, weight: Tensor, epsilon: float, use_model_sensitive_rmsnorm: int = 0) -> Tensor:
    return _normed(input, weight, epsilon)


def rmsnorm2d_fwd_with_add(
    out: Tensor,
    input: Tensor,
    residual_in: Tensor,
    residual_out: Tensor,
    weight: Tensor,
    epsilon: float,
    use_model_sensitive_rmsnorm: int = 0,
) -> None:
    residual_out.copy_(input.float() + residual_in.float())
    out.copy_(_normed(residual_out, weight, epsilon))
