"""The best token of each row of logits, and whether it can be relied on: all that a greedy row without rules needs of its logits."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class BestTokens:
    """Of R rows, on the device of their logits: `token_ids` (integers), the first of equals; `logits` float32, theirs; `is_finite` bool, whether all
    logits of the row are. Where they are not, the other two may be anything."""

    token_ids: Tensor
    logits: Tensor
    is_finite: Tensor

    @classmethod
    def of(cls, logits: Tensor, token_ids: Tensor) -> "BestTokens":
        """With `token_ids` `[R]` that somebody has found in `logits`, float32 `[R, vocab]`."""
        lowest, highest = logits.aminmax(dim=1)  # a NaN is its row's minimum and maximum
        return cls(token_ids, highest, lowest.isfinite() & highest.isfinite())


FindBest = Callable[[Tensor], BestTokens]
"""`Kernels.best_tokens`."""


def first_best(logits: Tensor) -> BestTokens:
    """Of `logits`, float32 `[R, vocab]`, on any device."""
    return BestTokens.of(logits, logits.argmax(dim=1))
