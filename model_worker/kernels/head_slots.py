"""Where the keys and values of a batch go in a pool whose blocks keep their heads apart."""

import torch
from torch import Tensor

from model_worker.kv_pool import KVPool


class HeadSlots:
    """Where a batch's keys and values go: `slot_mapping` int64 `[T]` of the batch, spread over the heads."""

    def __init__(self, slot_mapping: Tensor, kv: KVPool) -> None:
        self._kv = kv
        slot_mapping = slot_mapping.to(kv.store.device)
        block = torch.div(slot_mapping, kv.block_size, rounding_mode="floor")
        first = block * (kv.num_kv_heads * kv.block_size) + slot_mapping % kv.block_size
        # Token t's head h among a layer's [(num_blocks + 1) * H * block_size] vectors, [T * H].
        self._slots = (first.unsqueeze(1) + torch.arange(kv.num_kv_heads, device=slot_mapping.device) * kv.block_size).flatten()

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write keys and values, each `[T, num_kv_heads, head_dim]`, to the pool."""
        head_dim = self._kv.head_dim
        self._kv.keys(layer).view(-1, head_dim).index_copy_(0, self._slots, key.reshape(-1, head_dim))
        self._kv.values(layer).view(-1, head_dim).index_copy_(0, self._slots, value.reshape(-1, head_dim))
