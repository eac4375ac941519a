"""Weights in 8-bit floating point numbers (E4M3: arXiv:2209.05433) with a scale for each block of them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from model_worker.layers.weight_slot import WeightSlot
from model_worker.weights.errors import ModelUnsupported, WeightShapeMismatch
from model_worker.weights.fused_weights import Index, narrowed
from model_worker.weights.stored_weight import TensorPart
from model_worker.weights.tensor_files import StoredTensor, TensorFiles

DTYPE = "F8_E4M3"

ROWS_PER_STEP = 64
"""Rows decoded at a time: they and their scales stay in the cache (see `row_copy`)."""

_NUMBERS = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
"""By byte; looking up takes two thirds of the time of torch's conversion."""

_SCALE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e8m0fnu)


@dataclass(frozen=True, slots=True)
class Fp8Weight(TensorPart):
    """Element [r, c] of the whole tensor (of each expert's matrix, where it has three dimensions) is to be multiplied by
    scale [r // block[0], c // block[1]]. See `StoredWeight`."""

    scale: StoredTensor
    block: tuple[int, int]

    def read(self, files: TensorFiles, slot: WeightSlot) -> None:
        if len(self.shape) != 2:
            raise ModelUnsupported(f"{self.path}: {self.name} is {self.shape} in FP8; only matrices can be read")
        index = narrowed(self.index, len(self.tensor.shape), slot.dim, slice(slot.start, slot.stop))
        stored = files.read(self.tensor, index).view(torch.uint8)
        rows, columns = _places(index[-2], self.tensor.shape[-2]), _places(index[-1], self.tensor.shape[-1])
        scale = self._scales(files, index[:-2]).index_select(1, columns // self.block[1])
        pieces = (torch.split(tensor, ROWS_PER_STEP) for tensor in (slot.view, stored, rows // self.block[0]))
        for view, part, scale_rows in zip(*pieces, strict=True):
            numbers = _NUMBERS.index_select(0, part.flatten().int()).view(part.shape)
            view.copy_(numbers.mul_(scale.index_select(0, scale_rows)))

    def _scales(self, files: TensorFiles, leading: Index) -> Tensor:
        """Those of one matrix, float32 `[blocks of rows, blocks of columns]`."""
        scale = files.read(self.scale, leading)
        if scale.dtype not in _SCALE_DTYPES:
            raise ModelUnsupported(f"{self.scale.path}: {self.scale.name} is {scale.dtype}, not a floating point type")
        return scale.float().view(_grid(self.tensor.shape, self.block))


def fp8_weight(tensor: StoredTensor, scale: StoredTensor, block: tuple[int, int] | None) -> Fp8Weight:
    """With one scale for all of a matrix, one for each row, or one for each `block`, as many as there are. Raises ModelUnsupported and
    WeightShapeMismatch."""
    if len(tensor.shape) < 2:
        raise ModelUnsupported(f"{tensor.path}: {tensor.name} is {tensor.shape} in FP8; only matrices can be read")
    *leading, rows, columns = tensor.shape
    fitting: dict[tuple[int, ...], tuple[int, int]] = {} if block is None else {_grid(tensor.shape, block): block}
    fitting |= {
        (rows,): (1, columns),
        (rows, 1): (1, columns),
        (): (rows, columns),
        (1,): (rows, columns),
        (1, 1): (rows, columns),
    }
    if list(scale.shape[: len(leading)]) == leading and scale.shape[len(leading) :] in fitting:
        return Fp8Weight(tensor, scale, fitting[scale.shape[len(leading) :]])
    blocks = "" if block is None else f" and no grid of {block[0]} x {block[1]} blocks"
    raise WeightShapeMismatch(
        f"{scale.path}: {scale.name} is {scale.shape}: for {tensor.shape} neither one nor one per row{blocks}"
    )


def _grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[-2] // block[0]), -(-shape[-1] // block[1])


def _places(part: int | slice, size: int) -> Tensor:
    assert isinstance(part, slice)
    return torch.arange(*part.indices(size))
