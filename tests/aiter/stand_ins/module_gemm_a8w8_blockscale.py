"""A product of 8-bit floats: a scale for each 128 elements of a row of x, and for each 128 x 128 of the weight."""

import torch
from torch import Tensor

_BLOCK = 128


def gemm_a8w8_blockscale(XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, Out: Tensor) -> Tensor:
    blocks = XQ.shape[1] // _BLOCK
    assert x_scale.shape == (len(XQ), blocks) and w_scale.shape == (-(-len(WQ) // _BLOCK), blocks)
    assert x_scale.dtype == w_scale.dtype == torch.float32
    x = XQ.float() * x_scale.repeat_interleave(_BLOCK, 1)
    weight = WQ.float() * w_scale.repeat_interleave(_BLOCK, 0)[: len(WQ)].repeat_interleave(_BLOCK, 1)
    return Out.copy_(x @ weight.T)
