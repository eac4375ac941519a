"""What a model keeps of one position in the KV cache."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KVShape:
    """`num_planes` vectors of `head_dim` for each KV head of each layer: 2 for a key and a value, 1 for one vector that serves as both
    (multi-head latent attention). Where an index chooses the positions to attend to, its key is the last part of that vector."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_planes: int = 2

    def bytes_per_token(self, dtype: torch.dtype = torch.float32) -> int:
        """Bytes that one position takes over all layers."""
        return self.num_planes * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize
