"""What a gateway is told of the prefix caches of its scheduler's workers, for those who choose between gateways by it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, eq=False)
class PoolChange:
    """What changed in the prefix cache of one worker. Absolute: the same again changes nothing.

    First everything goes where `is_gone`, then blocks `removed` (int64 `[R]`), then blocks `block_ids` (int64 `[N]`) hold what their
    columns say, whatever they held before: `digests` and `links` uint64 `[N]`, the links of the hash chain of a block and before it;
    `has_parent` bool `[N]`, whether that is of a block, or of the namespace that a sequence begins in; `token_ids` int32 `[N, block size]`.
    `root`: the link of the namespace that sequences without a salt begin in.
    """

    worker: str
    root: int
    is_gone: bool
    removed: npt.NDArray[np.int64]
    block_ids: npt.NDArray[np.int64]
    digests: npt.NDArray[np.uint64]
    links: npt.NDArray[np.uint64]
    has_parent: npt.NDArray[np.bool_]
    token_ids: npt.NDArray[np.int32]

    @property
    def size(self) -> int:
        """How many blocks it tells of."""
        return len(self.removed) + len(self.block_ids)


@dataclass(frozen=True, slots=True)
class WatchKv:
    """The gateway wants to be told of prefix caches from now on, the whole first, or no more."""

    is_on: bool


@dataclass(frozen=True, slots=True)
class KvEvents:
    """Changes, in their order. `begins`: what was told before is void, and these begin the whole anew, which is complete with the first that is
    not to be followed by `more` of it."""

    changes: Sequence[PoolChange]
    begins: bool = False
    more: bool = False
