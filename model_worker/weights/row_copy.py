"""Copying weights into a layer's memory."""

import torch
from torch import Tensor

ROWS = 64
"""Rows copied at a time. Most layers keep their weights inputs first (see `Linear`), so a copy transposes; torch takes four times as long for
a whole large matrix as for pieces that stay in the cache."""


def copy_rows(view: Tensor, values: Tensor) -> None:
    """`view.copy_(values)` for two tensors of one shape."""
    if view.dim() < 2:
        view.copy_(values)
        return
    for rows, part in zip(torch.split(view, ROWS), torch.split(values, ROWS), strict=True):
        rows.copy_(part)
