"""The blocks that tables name, in the pool and in the host pool, as whole pieces that are moved, cleared and read."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from model_worker.host_pool import HostPool
from model_worker.kv_pool import KVPool
from tessera.values.batch import ScheduledBatch, SlotSwap

NO_PAIRS = np.empty((0, 2), dtype=np.int32)
NO_BLOCKS = np.empty(0, dtype=np.int32)
NO_SLOTS = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """What is done to blocks before a batch is computed, in this order, or to positions behind one. Pairs are int32 `[n, 2]` (source, target)."""

    swap_outs: np.ndarray = field(default_factory=lambda: NO_PAIRS)  # from the pool to the host pool
    copies: np.ndarray = field(default_factory=lambda: NO_PAIRS)  # within the pool, no target a source
    swap_ins: np.ndarray = field(default_factory=lambda: NO_PAIRS)  # from the host pool to the pool
    zero_blocks: np.ndarray = field(default_factory=lambda: NO_BLOCKS)  # of the pool, int32 `[Z]`
    zero_positions: np.ndarray = field(default_factory=lambda: NO_SLOTS)  # see `KVPool.zero_positions`

    @classmethod
    def of(cls, batch: ScheduledBatch) -> "Moves":
        """Those of a batch."""
        return cls(_pairs(batch.swap_outs), batch.copies, _pairs(batch.swap_ins), batch.zero_blocks)


class KVBlocks(Protocol):
    """All blocks of one worker, whether one process holds them or several ranks hold a part of each."""

    def move(self, moves: Moves) -> None:
        """Carry out `moves`."""
        ...

    def read(self, block_ids: Sequence[int], *, is_host: bool) -> list[np.ndarray]:
        """Copies of blocks of the pool, or of the host pool, as a process that holds all heads has them, see `KVPool.read_block`."""
        ...


class LocalBlocks:
    """Those of this process. See `KVBlocks`. Owns the host pool that it makes."""

    def __init__(self, kv: KVPool, num_host_blocks: int) -> None:
        self._kv = kv
        self._host = HostPool(kv, num_host_blocks)

    def move(self, moves: Moves) -> None:
        self._host.swap_out(moves.swap_outs)
        self._kv.copy_blocks(moves.copies)
        self._host.swap_in(moves.swap_ins)
        self._kv.zero_blocks(moves.zero_blocks)
        if len(moves.zero_positions):
            self._kv.zero_positions(moves.zero_positions)

    def read(self, block_ids: Sequence[int], *, is_host: bool) -> list[np.ndarray]:
        pool = self._host if is_host else self._kv
        return [pool.block(block_id) for block_id in block_ids]


def _pairs(swaps: Sequence[SlotSwap]) -> np.ndarray:
    return np.concatenate([NO_PAIRS, *[swap.pairs for swap in swaps]])
