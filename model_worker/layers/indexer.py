"""DeepSeek-V3.2's lightning indexer (arXiv:2512.02556, section 2.1): which positions a token attends to.

Its authors' kernels turn queries and keys by a Hadamard matrix and round them to 8 bits. The first leaves their products as they are,
the second is for speed: here neither is done.
"""

import torch
from torch import Tensor

from model_worker.kernels.interface import IndexQueries, Kernels
from model_worker.layers.linear import Linear
from model_worker.layers.rotary import rotate
from model_worker.layers.weight_slot import WeightSlot
from model_worker.models.indexer_config import IndexerConfig

NORM_EPS = 1e-6
"""Of the norm over its keys."""


class Indexer:
    """Makes of each token an index key, which the pool keeps, and what the token looks for among the keys before it. Queries come from
    the attention's own compressed ones, of `query_rank` elements."""

    def __init__(self, kernels: Kernels, hidden_size: int, query_rank: int, config: IndexerConfig) -> None:
        self._kernels = kernels
        self._config = config
        self._queries = Linear(kernels, query_rank, {"wq_b": config.num_heads * config.head_dim}, is_exact=True)
        keys = {"wk": config.head_dim, "weights_proj": config.num_heads}
        self._key_and_weights = Linear(kernels, hidden_size, keys, is_exact=True)
        self._norm_weight, self._norm_bias = torch.empty(config.head_dim), torch.empty(config.head_dim)

    def __call__(self, x: Tensor, compressed: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, IndexQueries]:
        """Of `x` `[T, hidden_size]` and compressed queries `[T, query_rank]`: index keys `[T, head_dim]`, and the queries."""
        sizes = self._config
        key, weights = self._key_and_weights(x).split_with_sizes((sizes.head_dim, sizes.num_heads), dim=1)
        key = self._kernels.layer_norm(key, self._norm_weight, self._norm_bias, NORM_EPS)
        query = self._queries(compressed).view(len(x), sizes.num_heads, sizes.head_dim)
        turned = rotate(self._kernels, torch.cat((query, key.unsqueeze(1)), dim=1), rotation)
        query, key = turned.split_with_sizes((sizes.num_heads, 1), dim=1)
        weights = weights * (sizes.num_heads * sizes.head_dim) ** -0.5
        return key.squeeze(1), IndexQueries(query, weights, sizes.num_chosen)

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """Checkpoint name -> where it goes."""
        norm = {"weight": self._norm_weight, "bias": self._norm_bias}
        return (
            self._queries.slots(prefix)
            | self._key_and_weights.slots(prefix)
            | {f"{prefix}.k_norm.{kind}": WeightSlot(view) for kind, view in norm.items()}
        )
