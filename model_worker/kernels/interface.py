"""The operations a model is made of. A backend implements them for one kind of device; models call nothing else.

Activations are `[T, features]` or `[T, heads, head_dim]`, T being the tokens of the batch. Nothing is changed in place
except the KV pool.
"""

from abc import ABC, abstractmethod

from torch import Tensor

from model_worker.batch import Batch
from model_worker.kv_pool import KVPool


class PagedAttention(ABC):
    """Attention of one batch over one pool: indices and masks are made once per step and serve every layer."""

    @abstractmethod
    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write the batch's keys and values, each `[T, num_kv_heads, head_dim]`, to the pool (reshape and cache)."""

    @abstractmethod
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention of `query` `[T, num_heads, head_dim]` over each row's whole context; returns `[T, num_heads * head_dim]`.

        `key` and `value` are what `store` was given for this layer before; query head h reads KV head
        h // (num_heads / num_kv_heads); scores are scaled by head_dim ** -0.5.
        """


class Kernels(ABC):
    """One backend."""

    @abstractmethod
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`x @ weight.T + bias`: x `[T, in]`, weight `[out, in]`, bias `[out]`."""

    @abstractmethod
    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Rows of `weight` `[vocab, hidden]` for int64 ids `[T]`."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x / sqrt(mean(x ** 2) + eps) * weight` over the last dimension."""

    @abstractmethod
    def rotary_embedding(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate `x` `[T, heads, head_dim]` pairing element i with i + head_dim / 2 (NeoX style); cos and sin are `[T, head_dim / 2]`."""

    @abstractmethod
    def silu_and_mul(self, x: Tensor) -> Tensor:
        """`silu(x[:, :n]) * x[:, n:]` for x `[T, 2 * n]`."""

    @abstractmethod
    def paged_attention(self, batch: Batch, kv: KVPool) -> PagedAttention:
        """Prepare attention for one step."""
