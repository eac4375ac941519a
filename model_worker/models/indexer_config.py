"""The shape of an index over the positions of a context."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class IndexerConfig:
    """Queries of `num_heads` heads and a key for all of them, each of `head_dim` elements; a token attends to the `num_chosen` best
    positions."""

    num_heads: int
    head_dim: int
    num_chosen: int
