"""Attention with grouped queries (arXiv:2305.13245) and rotary positions, as Llama has it, with the options of its relatives."""

import torch
from torch import Tensor

from model_worker.kernels.interface import Kernels, PagedAttention, RotatingAttention
from model_worker.layers.linear import Linear, RowLinear
from model_worker.layers.rms_norm import RMSNorm
from model_worker.layers.rotary import rotate
from model_worker.layers.share import head_share, kv_head_share
from model_worker.layers.weight_slot import WeightSlot
from model_worker.models.model_config import ModelConfig


class Attention:
    """Query, key and value projections as one product, rotation, attention over the context, output projection. With `config.qk_norm`
    each query and key head is normalised before its rotation. `output_bias`: whether the output projection has one. `inputs`: how many numbers
    the projections take, without it the hidden size. Each rank has some of the query heads and the KV heads that they read. Raises
    HeadsDoNotDivide."""

    def __init__(self, config: ModelConfig, kernels: Kernels, output_bias: bool, inputs: int | None = None) -> None:
        self._kernels = kernels
        heads, kv_heads = head_share(config.num_heads, kernels.group), kv_head_share(config.num_kv_heads, kernels.group)
        self._num_heads = heads.size
        self._num_kv_heads = kv_heads.size
        self._head_dim = config.head_dim
        q_rows, kv_rows = heads.times(config.head_dim), kv_heads.times(config.head_dim)
        outputs = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
        self._qkv_proj = Linear(kernels, inputs or config.hidden_size, outputs, config.attention_bias)
        self._o_proj = RowLinear(kernels, q_rows, "o_proj", config.hidden_size, output_bias)
        norms = ("q_norm", "k_norm") if config.qk_norm else ()
        self._norms = {name: RMSNorm(kernels, config.head_dim, config.rms_norm_eps) for name in norms}

    def __call__(self, x: Tensor, rotation: tuple[Tensor, Tensor], attention: PagedAttention, layer: int) -> Tensor:
        """`x` is `[T, inputs]`, the result `[T, hidden_size]`; the batch's keys and values are written to the pool."""
        qk, value = self._heads(x)
        if isinstance(attention, RotatingAttention):
            query, key = attention.rotate_and_store(layer, qk, value, rotation)
        else:
            query, key = self._split(rotate(self._kernels, qk, rotation))
            attention.store(layer, key, value)
        return self._o_proj(self._attend(attention, layer, query, key, value))

    @property
    def parts(self) -> tuple[Linear, dict[str, RMSNorm], RowLinear]:
        """Projections of the input, norms of heads by name, and the projection of the output."""
        return self._qkv_proj, self._norms, self._o_proj

    @property
    def num_heads(self) -> tuple[int, int]:
        """Of queries, and of keys; this rank's."""
        return self._num_heads, self._num_kv_heads

    def _attend(self, attention: PagedAttention, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """What a model with another attention overrides; shapes as `PagedAttention.attend` has them."""
        return attention.attend(layer, query, key, value)

    def _heads(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Query heads and key heads side by side, not yet rotated, and values."""
        qkv = self._qkv_proj(x).view(x.shape[0], -1, self._head_dim)
        qk, value = qkv.split_with_sizes((self._num_heads + self._num_kv_heads, self._num_kv_heads), dim=1)
        if self._norms:
            query, key = self._split(qk)
            qk = torch.cat((self._norms["q_norm"](query), self._norms["k_norm"](key)), dim=1)
        return qk, value

    def _split(self, qk: Tensor) -> tuple[Tensor, ...]:
        """Queries and keys."""
        return qk.split_with_sizes((self._num_heads, self._num_kv_heads), dim=1)

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """Checkpoint name -> where it goes."""
        slots = self._qkv_proj.slots(prefix) | self._o_proj.slots(prefix)
        for name, norm in self._norms.items():
            slots |= norm.slots(f"{prefix}.{name}")
        return slots
