"""Where a model's weights and its KV lie, and what numbers it computes with."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Placement:
    """A device, and the dtype of weights and activations on it. What must be exact (angles, router scores, logits) is float32 on any."""

    device: torch.device
    dtype: torch.dtype

    def take(self, tensor: Tensor) -> Tensor:
        """A tensor of the host on this device: itself where it is there."""
        return tensor.to(self.device)

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Within it a new tensor has this device and dtype unless it says otherwise: layers are made so. The dtype holds for the whole process,
        so one model is made at a time."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with self.device:
                yield
        finally:
            torch.set_default_dtype(before)


ON_CPU = Placement(torch.device("cpu"), torch.float32)
"""float32 on a CPU: what every other placement is measured by."""
