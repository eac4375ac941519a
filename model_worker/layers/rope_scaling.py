"""How a rotary embedding is stretched beyond the positions that a model was first trained for."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1: wavelengths beyond `original_max_len / low_freq_factor` positions are stretched by `factor`, those below
    `original_max_len / high_freq_factor` stay, those between go over smoothly."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_len: int

    @property
    def attention_factor(self) -> float:
        """What cosines and sines are multiplied by."""
        return 1.0

    def frequencies(self, dim: int, theta: float) -> Tensor:
        """Angle per position of each pair, float32 `[dim / 2]`."""
        plain = plain_frequencies(dim, theta)
        turns = self.original_max_len * plain / (2 * math.pi)  # in the original context
        smooth = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0.0, 1.0)
        return (1.0 - smooth) * plain / self.factor + smooth * plain


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv:2309.00071): pairs that turn less than `beta_slow` times in the original context are stretched by `factor`, those that
    turn more than `beta_fast` times stay, those between are blended by their index.

    `attention_factor` multiplies cosines and sines, which makes scores sharper; `score_factor` multiplies the scores themselves, where
    a model asks for that (DeepSeek).
    """

    factor: float
    original_max_len: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    score_factor: float = 1.0
    truncate: bool = True  # the blended range begins and ends at whole indices

    def frequencies(self, dim: int, theta: float) -> Tensor:
        """Angle per position of each pair, float32 `[dim / 2]`."""
        plain = plain_frequencies(dim, theta)
        first, last = self._pair(self.beta_fast, dim, theta), self._pair(self.beta_slow, dim, theta)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        last += 0.001 if first == last else 0.0  # as the authors do: no division by zero
        stretched = ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0.0, 1.0)
        return stretched * plain / self.factor + (1.0 - stretched) * plain

    def _pair(self, turns: float, dim: int, theta: float) -> float:
        """The index of the pair that turns so often in the original context."""
        return dim * math.log(self.original_max_len / (turns * 2 * math.pi)) / (2 * math.log(theta))


RopeScaling = Llama3Scaling | YarnScaling


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """The paper's temperature for contexts stretched by `factor`: 0.1 * mscale * ln(factor) + 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def plain_frequencies(dim: int, theta: float) -> Tensor:
    """Angle per position of each pair without any stretching, float32 `[dim / 2]`: theta ** (-2 i / dim)."""
    return 1.0 / (theta ** (torch.arange(0, dim, 2).float() / dim))
