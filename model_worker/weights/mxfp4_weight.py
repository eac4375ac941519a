"""gpt-oss's experts in MXFP4 (OCP Microscaling Formats 1.0): 32 numbers of 4 bits share a power of two."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from model_worker.layers.weight_slot import WeightSlot
from model_worker.weights.errors import ModelUnsupported, WeightShapeMismatch
from model_worker.weights.fused_weights import Index
from model_worker.weights.tensor_files import StoredTensor, TensorFiles

BLOCK = 32

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = torch.tensor(_POSITIVE + tuple(-number for number in _POSITIVE))
"""E2M1, by its 4 bits."""

_PAIRS = torch.stack((_NUMBERS.repeat(16), _NUMBERS.repeat_interleave(16)), dim=1)
"""The two numbers of each byte, float32 `[256, 2]`: the first is in its low half."""


@dataclass(frozen=True, slots=True)
class Mxfp4Weight:
    """All experts of a layer: `blocks` uint8 `[E, out, in / 32, 16]` and the exponents of their factors, `scales` uint8 `[E, out, in / 32]`.
    The weight is `[E, in, out]`, as gpt-oss has it when it is not quantized. See `StoredWeight`."""

    blocks: StoredTensor
    scales: StoredTensor

    @property
    def path(self) -> Path:
        return self.blocks.path

    @property
    def name(self) -> str:
        return self.blocks.name.removesuffix("_blocks")

    @property
    def shape(self) -> tuple[int, ...]:
        experts, outputs, count, _ = self.blocks.shape
        return experts, count * BLOCK, outputs

    def part(self, index: Index) -> Self:
        if index:
            raise ModelUnsupported(f"{self.path}: {self.name} is in MXFP4, which can be read only for gpt-oss")
        return self

    def read(self, files: TensorFiles, slot: WeightSlot) -> None:
        parts = [range(size) for size in self.shape]
        parts[slot.dim] = range(slot.start, slot.stop)
        experts, inputs, outputs = parts
        first = inputs.start // BLOCK  # the first block of which something is wanted
        inside = slice(inputs.start - first * BLOCK, inputs.stop - first * BLOCK)
        for view, expert in zip(slot.view, experts, strict=True):
            index = (expert, slice(outputs.start, outputs.stop), slice(first, -(-inputs.stop // BLOCK)))
            view.copy_(decoded(files.read(self.blocks, index), files.read(self.scales, index))[:, inside].t())


def mxfp4_weight(blocks: StoredTensor, scales: StoredTensor) -> Mxfp4Weight:
    """Raises ModelUnsupported and WeightShapeMismatch."""
    if len(blocks.shape) != 4 or blocks.shape[3] != BLOCK // 2:
        raise ModelUnsupported(f"{blocks.path}: {blocks.name} is {blocks.shape}; only blocks of {BLOCK} numbers can be read")
    for tensor in (blocks, scales):
        if tensor.dtype != "U8":
            raise ModelUnsupported(f"{tensor.path}: {tensor.name} is {tensor.dtype}; MXFP4 is stored as bytes, U8")
    if scales.shape != blocks.shape[:3]:
        raise WeightShapeMismatch(
            f"{scales.path}: {scales.name} is {scales.shape}, for {blocks.name} it must be {blocks.shape[:3]}"
        )
    return Mxfp4Weight(blocks, scales)


def decoded(blocks: Tensor, scales: Tensor) -> Tensor:
    """float32 `[out, count * 32]` of uint8 `[out, count, 16]` and `[out, count]`."""
    pairs = _PAIRS.index_select(0, blocks.flatten().int())
    numbers = pairs.view(*scales.shape, BLOCK).mul_(scales.view(torch.float8_e8m0fnu).float().unsqueeze(2))
    return numbers.flatten(1)
