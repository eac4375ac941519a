"""The words of `model_worker.noise` for whole rows, made by torch where the logits are.

torch computes with signed numbers. Their sums and products wrap round to the bits that unsigned ones have; what is shifted to the right is masked,
so that no sign comes after it.
"""

import torch
from torch import Tensor

from model_worker.noise import KEY_STEPS, MULTIPLIERS, ROUNDS

_LOW = 0xFFFFFFFF
_HALF = 32
_BLOCK_WORDS = 8


def device_words(seeds: Tensor, output_indices: Tensor, count: int) -> Tensor:
    """`noise_words` of each of R rows, int64 `[R, count]`: `seeds` and `output_indices` int64 `[R]`, with the bits of uint64."""
    blocks = torch.arange(1, -(-count // _BLOCK_WORDS) + 1, device=seeds.device)
    zero = torch.zeros(1, 1, dtype=torch.int64, device=seeds.device)
    outputs = philox((blocks[None], output_indices[:, None], zero, zero), (seeds[:, None], zero))
    halves = [half for output in outputs for half in (output & _LOW, output >> _HALF & _LOW)]
    return torch.stack(halves, dim=-1).view(len(seeds), -1)[:, :count]


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """The four 64-bit outputs, int64 of a shape that all words of counter and key have in common. As long as the words are of smaller shapes, so is
    what is computed: the first rounds of a row's blocks cost next to nothing."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _product(MULTIPLIERS[0], c0)
        high1, low1 = _product(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _signed(KEY_STEPS[0]), k1 + _signed(KEY_STEPS[1])
    return c0, c1, c2, c3


def _product(factor: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """The high and the low 64 bits of `factor * x`, by halves of 32 bits."""
    factor_low, factor_high = factor & _LOW, factor >> _HALF
    x_low, x_high = x & _LOW, x >> _HALF & _LOW
    middle = x_high * factor_low + (x_low * factor_low >> _HALF & _LOW)
    other = x_low * factor_high + (middle & _LOW)
    return x_high * factor_high + (middle >> _HALF & _LOW) + (other >> _HALF & _LOW), x * _signed(factor)


def _signed(number: int) -> int:
    """With the same 64 bits."""
    return number - (1 << 64) if number >> 63 else number
