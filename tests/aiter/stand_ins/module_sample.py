"""Sampling by the exponential race: argmax of probability over noise."""

from torch import Tensor


def mixed_sample_outer_exponential(
    out: Tensor, input: Tensor, exponentials: Tensor, temperatures: Tensor, eps: float = 1e-10
) -> None:
    is_greedy = (temperatures == 0)[:, None]
    scaled = input.float() / temperatures[:, None].masked_fill(is_greedy, 1.0)
    race = scaled.softmax(-1) / (exponentials + eps)
    out.copy_(race.where(~is_greedy, input.float()).argmax(-1))
