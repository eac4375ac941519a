"""Rotation of heads by cached angles."""

import torch
from torch import Tensor


def rope_cached_positions_fwd_impl(
    output: Tensor,
    input: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    rotate_style: int,
    reuse_freqs_front_part: bool,
    nope_first: bool,
) -> None:
    """`input` [s, b, heads, d] is rotated by row `positions` [s, b] of `cos` and `sin` [N, 1, 1, d / 2], element i with i + d / 2."""
    assert rotate_style == 0 and reuse_freqs_front_part and not nope_first
    assert cos.is_contiguous() and sin.is_contiguous() and positions.stride(1) == 1 and 2 * cos.shape[3] == input.shape[3]
    first, second = input.float().chunk(2, -1)
    cosines, sines = (table[positions].squeeze(3).float() for table in (cos, sin))
    output.copy_(torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1))
