"""Where a weight of a checkpoint goes, and which part of it belongs there."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class WeightSlot:
    """`view` is the layer's memory to copy into. It takes the whole weight, or, with a `whole_size`, those elements of dimension `dim` of a
    weight with `whole_size` elements there that begin at `start`: a rank of a tensor-parallel model holds only its part. A view without
    elements is a weight that another rank holds: the checkpoint has it, and nothing is read. `when_read` is to be called once the view has
    its elements."""

    view: Tensor
    dim: int = 0
    start: int = 0
    whole_size: int | None = None
    when_read: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        stop = self.start + self.view.shape[self.dim]
        assert self.start >= 0 and stop <= self.shape[self.dim], f"[{self.start}, {stop}) of {self.shape}"

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole weight, as the checkpoint has it."""
        shape = list(self.view.shape)
        if self.whole_size is not None:
            shape[self.dim] = self.whole_size
        return tuple(shape)

    @property
    def stop(self) -> int:
        """Where the part ends in dimension `dim`."""
        return self.start + self.view.shape[self.dim]

    @property
    def is_whole(self) -> bool:
        """Whether `view` takes all of the weight."""
        return tuple(self.view.shape) == self.shape


def watched(slots: Mapping[str, WeightSlot], when_all_read: Callable[[], None]) -> dict[str, WeightSlot]:
    """These slots, which make a weight together: `when_all_read` is called when the last of them has been read."""
    missing = set(slots)

    def when_read(name: str) -> None:
        missing.discard(name)
        if not missing:
            when_all_read()

    return {name: replace(slot, when_read=partial(when_read, name)) for name, slot in slots.items()}
