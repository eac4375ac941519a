"""The shape of a mixture of experts."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """gpt-oss's activation: gate * sigmoid(alpha * gate) * (up + 1), gate at most `limit`, up between -limit and limit."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """`num_experts` feed-forward layers of `intermediate_size` in each of `layers`, of which a token goes through `num_chosen`."""

    num_experts: int
    num_chosen: int
    intermediate_size: int
    layers: frozenset[int]  # the others are dense, but for those behind the last
    renormalize: bool  # the weights of a token's experts are scaled to a sum of 1
    num_shared: int = 0  # more experts of the same size, which every token goes through
    num_groups: int = 1  # groups of neighbours, of which num_groups_chosen come into question for a token
    num_groups_chosen: int = 1
    scale: float = 1.0  # of the weights, at last
    swiglu: ClampedSwiGLU | None = None  # None: silu(gate) * up, no biases
