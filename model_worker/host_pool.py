"""The host pool: where the KV of sequences that are swapped out waits."""

import numpy as np

from model_worker.kv_pool import KVPool, reserved_zeros


class HostPool:
    """Blocks in host memory, each in one piece: `[num_blocks, num_layers, num_planes, num_kv_heads, block_size, head_dim]`.

    Owned by one engine, beside its pool, and paired as that is. Memory is reserved, not resident, until a block is first written.
    """

    def __init__(self, kv: KVPool, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._kv = kv
        shape = (num_blocks, kv.num_layers, kv.num_planes, kv.num_kv_heads, kv.block_size, kv.head_dim)
        self._data = reserved_zeros(shape, kv.dtype)
        self._paired = None if kv.paired is None else HostPool(kv.paired, num_blocks)

    def swap_out(self, pairs: np.ndarray) -> None:
        """Copy blocks of the pool to here: `pairs` int32 `[P, 2]` (block of the pool, host block)."""
        for source, target in pairs.tolist():
            self._data[target].copy_(self._kv.raw_block(source))
        if self._paired is not None:
            self._paired.swap_out(pairs)

    def swap_in(self, pairs: np.ndarray) -> None:
        """Copy blocks from here to the pool: `pairs` int32 `[P, 2]` (host block, block of the pool)."""
        for source, target in pairs.tolist():
            self._kv.raw_block(target).copy_(self._data[source])
        if self._paired is not None:
            self._paired.swap_in(pairs)

    def block(self, block_id: int) -> np.ndarray:
        """A copy of one block, see `KVPool.read_block`."""
        return self._kv.read_block(self._data[block_id])
