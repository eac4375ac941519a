"""A product of 8-bit floats: a scale for each row of both, the weight shuffled."""

import torch
from torch import Tensor


def gemm_a8w8_bpreshuffle(XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, Out: Tensor) -> Tensor:
    assert x_scale.shape == (len(XQ), 1) and w_scale.shape == (len(WQ), 1) and x_scale.dtype == w_scale.dtype == torch.float32
    rows, columns = WQ.shape
    weight = WQ.view(rows // 16, columns // 32, 2, 16, 16).permute(0, 3, 1, 2, 4).reshape(rows, columns)
    return Out.copy_((XQ.float() * x_scale) @ (weight.float() * w_scale).T)
