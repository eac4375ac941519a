"""A checkout of AITER's repository in place of the published wheel: `AITER_TEST_CHECKOUT=CHECKOUT make test-aiter`. For what the wheel has not yet."""

import functools
import os
import sys
from typing import Any
from unittest import mock

import torch

CHECKOUT = os.environ.get("AITER_TEST_CHECKOUT")
"""None: the wheel."""


def use(folder: str) -> None:
    """To be called when AITER can be imported but has not been."""
    sys.path.insert(0, folder)
    from aiter.ops.triton import activation

    fused_silu_mul = activation.fused_silu_mul

    # It refuses tensors that are on no GPU, before it launches its kernel.
    @functools.wraps(fused_silu_mul)
    def of_any_device(*args: Any, **keywords: Any) -> Any:
        with mock.patch.object(torch.Tensor, "is_cuda", True):
            return fused_silu_mul(*args, **keywords)

    activation.fused_silu_mul = of_any_device
