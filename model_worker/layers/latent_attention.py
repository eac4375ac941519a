"""Multi-head latent attention (MLA: DeepSeek-V2, arXiv:2405.04434, section 2.1), over a cache of what all heads share.

Of a position the pool keeps one vector: a latent of `kv_lora_rank` elements, from which each head would make its key and value, and a
rotated part that is every head's. Instead of making keys and values for the whole context at each step, the projections move to the
other side: q . (U_k c) = (U_k^T q) . c, and sum p_i (U_v c_i) = U_v (sum p_i c_i). So this is attention of many query heads over one KV
head whose key is also its value ("absorbed"). With an indexer it is over the positions that this one chooses.
"""

import math

import torch
from torch import Tensor

from model_worker.kernels.interface import Kernels, PagedAttention, SparseAttention
from model_worker.layers.indexer import Indexer
from model_worker.layers.linear import Linear, RowLinear
from model_worker.layers.rms_norm import RMSNorm
from model_worker.layers.rotary import rotate
from model_worker.layers.share import Share, head_share
from model_worker.layers.weight_slot import WeightSlot
from model_worker.models.latent_config import LatentConfig
from model_worker.models.model_config import ModelConfig

NORM_EPS = 1e-6
"""Of the norms inside; transformers takes no other here, whatever config.json says."""


class _Queries:
    """`[T, hidden_size]` to `[T, heads * head_dim]`, the heads being this rank's; where `q_lora_rank` is given in two steps, with a norm between them."""

    def __init__(self, config: ModelConfig, kernels: Kernels, latent: LatentConfig, heads: Share) -> None:
        rows = heads.times(latent.qk_nope_head_dim + latent.qk_rope_head_dim)
        if latent.q_lora_rank is None:
            self._last, self._down = Linear(kernels, config.hidden_size, {"q_proj": rows}), None
        else:
            self._down = Linear(kernels, config.hidden_size, {"q_a_proj": latent.q_lora_rank}, config.attention_bias)
            self._norm = RMSNorm(kernels, latent.q_lora_rank, NORM_EPS)
            self._last = Linear(kernels, latent.q_lora_rank, {"q_b_proj": rows})

    def compressed(self, x: Tensor) -> Tensor:
        """The first step: `[T, q_lora_rank]`, or `x` itself."""
        return x if self._down is None else self._norm(self._down(x))

    def __call__(self, compressed: Tensor) -> Tensor:
        return self._last(compressed)

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        if self._down is None:
            return self._last.slots(prefix)
        return self._down.slots(prefix) | self._norm.slots(f"{prefix}.q_a_layernorm") | self._last.slots(prefix)


class LatentAttention:
    """See above. The pool has one plane (`ModelConfig.kv_shape`). Scores are scaled by the size of a whole head, and by YaRN's factor. Each rank
    has some of the heads, and all that the pool keeps. Raises HeadsDoNotDivide."""

    def __init__(self, config: ModelConfig, kernels: Kernels) -> None:
        latent = config.latent
        assert latent is not None
        self._kernels = kernels
        self._latent = latent
        heads = head_share(config.num_heads, kernels.group)
        self._num_heads = heads.size
        self._queries = _Queries(config, kernels, latent, heads)
        self._indexer = None
        if latent.indexer is not None:
            assert latent.q_lora_rank is not None
            self._indexer = Indexer(kernels, config.hidden_size, latent.q_lora_rank, latent.indexer)
        self._kv_a = Linear(kernels, config.hidden_size, {"kv_a_proj_with_mqa": latent.kept}, config.attention_bias)
        self._kv_norm = RMSNorm(kernels, latent.kv_lora_rank, NORM_EPS)
        # Per head: rows that make the key's part without a position, above rows that make the value.
        self._kv_b = torch.empty(heads.size, latent.qk_nope_head_dim + latent.v_head_dim, latent.kv_lora_rank)
        self._kv_b_rows = heads.times(self._kv_b.shape[1])
        self._o_proj = RowLinear(kernels, heads.times(latent.v_head_dim), "o_proj", config.hidden_size, config.attention_bias)
        scale = (latent.qk_nope_head_dim + latent.qk_rope_head_dim) ** -0.5 * getattr(config.rope_scaling, "score_factor", 1.0)
        self._query_scale = scale * math.sqrt(latent.kept)  # the kernel scales by the size of what the pool keeps

    def __call__(self, x: Tensor, rotation: tuple[Tensor, Tensor], attention: PagedAttention, layer: int) -> Tensor:
        """`x` and the result are `[T, hidden_size]`; what the pool keeps of the batch's positions is written to it."""
        sizes = self._latent
        compressed = self._queries.compressed(x)
        query = self._queries(compressed).view(len(x), self._num_heads, -1)
        plain_query, turned_query = query.split_with_sizes((sizes.qk_nope_head_dim, sizes.qk_rope_head_dim), dim=2)
        content, turned_key = self._kv_a(x).split_with_sizes((sizes.kv_lora_rank, sizes.qk_rope_head_dim), dim=1)
        turned = rotate(self._kernels, self._in_halves(torch.cat((turned_query, turned_key.unsqueeze(1)), dim=1)), rotation)
        key = torch.cat((self._kv_norm(content).unsqueeze(1), turned[:, self._num_heads :]), dim=2)
        to_key, to_value = self._kv_b.split_with_sizes((sizes.qk_nope_head_dim, sizes.v_head_dim), dim=1)
        absorbed = self._kernels.linear_per_head(plain_query, to_key.transpose(1, 2))
        query = torch.cat((absorbed, turned[:, : self._num_heads]), dim=2) * self._query_scale
        if self._indexer is None:
            attention.store(layer, key, key)
            seen = attention.attend_latent(layer, query, key, sizes.kv_lora_rank)
        else:
            assert isinstance(attention, SparseAttention)
            index_key, index = self._indexer(x, compressed, rotation)
            key = torch.cat((key, index_key.unsqueeze(1)), dim=2)
            attention.store(layer, key, key)
            seen = attention.attend_chosen(layer, query, index, sizes.kv_lora_rank)
        return self._o_proj(self._kernels.linear_per_head(seen, to_value).flatten(1))

    def _in_halves(self, x: Tensor) -> Tensor:
        """`x` `[T, heads, qk_rope_head_dim]` so that partners lie half a head apart, as the kernel rotates them. The order of the
        elements does not matter to scores, being the same in queries and keys."""
        if not self._latent.is_interleaved:
            return x
        return x.view(*x.shape[:2], -1, 2).transpose(2, 3).flatten(2)

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """Checkpoint name -> where it goes."""
        index = {} if self._indexer is None else self._indexer.slots(f"{prefix}.indexer")
        return index | (
            self._queries.slots(prefix)
            | self._kv_a.slots(prefix)
            | self._kv_norm.slots(f"{prefix}.kv_a_layernorm")
            | {f"{prefix}.kv_b_proj.weight": self._kv_b_rows.slot(self._kv_b.flatten(0, 1))}
            | self._o_proj.slots(prefix)
        )
