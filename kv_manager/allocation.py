"""What the block manager is asked for, and says, when a table is filled or moved."""

from dataclasses import dataclass
from typing import TypeAlias

BlockPairs: TypeAlias = list[tuple[int, int]]
"""(source, target) of blocks that the batch is to copy whole, in the order of the table. No target is named twice."""


@dataclass(frozen=True, slots=True)
class PoolExhausted:
    """A request for blocks that changed nothing: it takes `needed` blocks out of the free list, which has `free`."""

    needed: int
    free: int


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Cached blocks a sequence of `num_tokens` tokens can start with. No references: good until the pool changes.

    `free_block_ids` are those of `block_ids` that sit in the free list; taking one costs a free block like a fresh one does.
    """

    num_tokens: int
    num_cached_tokens: int
    block_ids: list[int]
    free_block_ids: list[int]
    pool_version: int
