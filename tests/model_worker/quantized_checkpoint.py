"""Checkpoints with quantized weights, made from plain ones: the numbers that are nearest, with scales as published models have them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def rewrite(
    directory: Path, quantization: dict[str, Any] | None, change: Callable[[str, Tensor], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Give the checkpoint what `change` makes of each of its tensors, and `quantization` in its config.json. Returns the tensors."""
    stored: dict[str, Tensor] = {}
    for path in directory.glob("*.safetensors"):
        weights: dict[str, Tensor] = {}
        for name, tensor in load_file(path).items():
            weights |= change(name, tensor)
        save_file(weights, path)
        stored |= weights
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = quantization
    (directory / "config.json").write_text(json.dumps(config))
    return stored


def is_linear(name: str, tensor: Tensor) -> bool:
    """Whether published FP8 checkpoints have it in FP8."""
    is_plain = tensor.ndim != 2 or "weights_proj" in name
    return not is_plain and name.endswith(("proj.weight", "kv_a_proj_with_mqa.weight", "wq_b.weight", "wk.weight"))


def to_fp8(tensor: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """E4M3 numbers, and a scale for each block of so many rows and columns: the largest number of a block becomes 448."""
    grid = -(-tensor.shape[0] // rows), -(-tensor.shape[1] // columns)
    scales, numbers = torch.empty(grid), torch.empty_like(tensor, dtype=torch.float8_e4m3fn)
    for row in range(grid[0]):
        for column in range(grid[1]):
            block = slice(row * rows, (row + 1) * rows), slice(column * columns, (column + 1) * columns)
            scales[row, column] = tensor[block].abs().max() / 448
            numbers[block] = (tensor[block] / scales[row, column]).to(torch.float8_e4m3fn)
    return numbers, scales


def from_fp8(numbers: Tensor, scales: Tensor, rows: int, columns: int) -> Tensor:
    """What `to_fp8` stands for, in float64."""
    spread = scales.double().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return numbers.double() * spread[: numbers.shape[0], : numbers.shape[1]]


def to_mxfp4(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """gpt-oss's form of `[E, in, out]`: uint8 blocks `[E, out, in / 32, 16]` and scales `[E, out, in / 32]`."""
    groups = tensor.transpose(1, 2).unflatten(2, (-1, 32))
    exponents = (groups.abs().amax(3).log2().floor() - 2).clamp(-127, 127)
    nearest = (groups / exponents.exp2().unsqueeze(3)).unsqueeze(4).sub(E2M1).abs().argmin(4).to(torch.uint8)
    return nearest[..., ::2] | nearest[..., 1::2] << 4, (exponents + 127).to(torch.uint8)
