"""The port to the ranks that hold one model together (tensor parallelism: Megatron-LM, arXiv:1909.08053, section 3), or its experts."""

from typing import Protocol

from torch import Tensor


class Group(Protocol):
    """`size` ranks, of which this is `rank`. Every rank makes the same calls in the same order with tensors of the same shape and dtype; a call
    returns when all have made it. A rank that is gone makes the others' calls raise GroupBroken."""

    @property
    def rank(self) -> int:
        """From 0."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are, this one included."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's `x`, the same bits on each of them. It may take the place of `x`."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's `x`, by rank: `[size, *x.shape]`."""
        ...

    def gather(self, x: Tensor) -> Tensor | None:
        """`all_gather` for rank 0 alone; None on the others."""
        ...

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Of `x` `[size, ...]` part number `rank`, summed over the ranks in their order."""
        ...


class GroupBroken(Exception):
    """A collective call cannot end: another rank has left it, or does not come."""


class Alone:
    """A group of one rank. See `Group`."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)

    def gather(self, x: Tensor) -> Tensor | None:
        return x.unsqueeze(0)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x[0]


ALONE: Group = Alone()
"""What a model has that is not spread over ranks."""
