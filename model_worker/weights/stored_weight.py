"""A weight of the model as its files have it."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, Self

import torch

from model_worker.layers.weight_slot import WeightSlot
from model_worker.weights.errors import ModelUnsupported
from model_worker.weights.fused_weights import Index, narrowed, part_shape
from model_worker.weights.row_copy import copy_rows
from model_worker.weights.tensor_files import StoredTensor, TensorFiles

_SCALELESS = " without a scale"
"""Numbers of one byte mean nothing by themselves."""

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class StoredWeight(Protocol):
    """All or a part of what the file at `path` has under `name`."""

    @property
    def path(self) -> Path:
        """Of the file, for messages."""
        ...

    @property
    def name(self) -> str:
        """In the file, without what is due to its format."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight, or of the part, once it is read."""
        ...

    def part(self, index: Index) -> Self:
        """A part of the whole."""
        ...

    def read(self, files: TensorFiles, slot: WeightSlot) -> None:
        """Copy what `slot`, of the same shape, is for into its view. Raises ModelUnsupported."""
        ...


@dataclass(frozen=True, slots=True)
class TensorPart:
    """The part `index` of `tensor`: what a `StoredWeight` is whose shape is that of its tensor."""

    tensor: StoredTensor
    index: Index = field(default=(), kw_only=True)

    @property
    def path(self) -> Path:
        """See `StoredWeight`."""
        return self.tensor.path

    @property
    def name(self) -> str:
        """See `StoredWeight`."""
        return self.tensor.name

    @property
    def shape(self) -> tuple[int, ...]:
        """See `StoredWeight`."""
        return part_shape(self.index, self.tensor.shape)

    def part(self, index: Index) -> Self:
        """See `StoredWeight`."""
        return replace(self, index=index)


@dataclass(frozen=True, slots=True)
class PlainWeight(TensorPart):
    """Its numbers are the weight's. See `StoredWeight`."""

    def read(self, files: TensorFiles, slot: WeightSlot) -> None:
        index = self.index
        if not slot.is_whole:
            index = narrowed(index, len(self.tensor.shape), slot.dim, slice(slot.start, slot.stop))
        weight = files.read(self.tensor, index)
        if weight.dtype not in _DTYPES:
            raise ModelUnsupported(
                f"{self.path}: {self.name} is {weight.dtype}{_SCALELESS if weight.dtype.is_floating_point and weight.dtype.itemsize == 1 else ''}; float32, float16 and bfloat16 can be read"
            )
        copy_rows(slot.view, weight)
