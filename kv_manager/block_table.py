"""The block table of one sequence, and a table as a worker reported it."""

from array import array
from dataclasses import dataclass, field

from kv_manager.hash_chain import TokenIds


@dataclass(slots=True)
class BlockTable:
    """Which blocks hold a sequence's KV, in order of position. Owned by the sequence for its whole life, changed by the manager.

    The first `num_published` blocks are in the prefix index, which has their digests. `digests` caches the hash chain over the full blocks
    behind them as far as it has been needed; it outlives preemption, because committed tokens are only ever appended to. A sequence
    that restarts from other tokens takes a new table. While a sequence is swapped out, `host_block_ids` are the host blocks
    with its KV, in order of position, and `block_ids` is empty.

    `namespace` is who may share the sequence's KV beside what the pool demands (an adapter and its version, a tenant's salt): bytes of
    `join_namespace`, empty where anybody may. It is set before the first use and never changes.
    """

    block_ids: "array[int]" = field(default_factory=lambda: array("i"))
    digests: "array[int]" = field(default_factory=lambda: array("Q"))
    num_published: int = 0
    host_block_ids: tuple[int, ...] = ()
    namespace: bytes = b""


@dataclass(frozen=True, slots=True)
class HeldTable:
    """A table that is live on a worker: KV of positions `[0, num_computed)` is valid for `token_ids`.

    Blocks behind that are allocated, but may still carry what an earlier owner wrote.
    """

    table: BlockTable
    token_ids: TokenIds
    num_computed: int
