"""The operations a model is made of. A backend implements them for one kind of device; models call nothing else.

Activations are `[T, features]` or `[T, heads, head_dim]`, T being the tokens of the batch. Nothing is changed in place
except the KV pool.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model_worker.batch import Batch
from model_worker.group import ALONE, Group
from model_worker.kernels.best_tokens import BestTokens, first_best
from model_worker.kv_layout import KVLayout
from model_worker.kv_pool import KVPool, KVStore
from model_worker.models.experts_config import ExpertsConfig
from model_worker.models.model_config import ModelConfig
from model_worker.placement import ON_CPU, Placement

Product = Callable[[Tensor, Tensor | None], Tensor]
"""`x @ weight.T + bias` of x `[T, in]` and bias `[out]`, with a weight of its own."""

ExpertsSum = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`Kernels.experts` of x, ids and weights, with experts of its own."""


class Table(ABC):
    """A weight `[vocab, hidden]` of which rows are read, and which is multiplied by."""

    @abstractmethod
    def rows(self, ids: Tensor) -> Tensor:
        """Rows `[T, hidden]` for int64 ids `[T]`."""

    @abstractmethod
    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See `Product`."""


class PagedAttention(ABC):
    """Attention of one batch over one pool: indices and masks are made once per step and serve every layer."""

    @abstractmethod
    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write the batch's keys and values, each `[T, num_kv_heads, head_dim]`, to the pool (reshape and cache). Where the pool has one
        plane (`KVShape`), both are the same tensor."""

    @abstractmethod
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention of `query` `[T, num_heads, head_dim]` over each row's whole context; returns `[T, num_heads * head_dim]`.

        `key` and `value` are what `store` was given for this layer before; query head h reads KV head
        h // (num_heads / num_kv_heads); scores are scaled by head_dim ** -0.5.
        """

    def attend_latent(self, layer: int, query: Tensor, key: Tensor, rank: int) -> Tensor:
        """As `attend` where the pool has one plane: of what it gives the first `rank` elements of each head, `[T, num_heads, rank]`. Kernels made
        for this compute no more."""
        return self.attend(layer, query, key, key).view(query.shape)[..., :rank]


class RotatingAttention(PagedAttention):
    """Paged attention that rotates queries and keys on their way to the pool, in one kernel."""

    @abstractmethod
    def rotate_and_store(self, layer: int, qk: Tensor, value: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Query heads and key heads `qk` `[T, num_heads + num_kv_heads, head_dim]`, whose leading elements are rotated by `rotation`, cos and
        sin `[T, n]`, as `Kernels.rotary_embedding` does; keys and `value` `[T, num_kv_heads, head_dim]` are written to the pool. Returns
        queries, and keys for `attend`, which need not be rotated where that reads the pool alone."""


class WindowedAttention(PagedAttention):
    """Paged attention for models with sinks and sliding windows."""

    @abstractmethod
    def attend_window(self, layer: int, query: Tensor, sinks: Tensor, window: int | None) -> Tensor:
        """As `attend`, over what `store` was given, with a further term in each softmax's denominator: exp of `sinks` `[num_heads]`. A
        query sees itself and the `window - 1` positions before it; None: all."""


@dataclass(frozen=True, slots=True, eq=False)
class IndexQueries:
    """What the tokens of a batch look for among index keys: `query` `[T, heads, dim]`, `weights` `[T, heads]`. The score of a position with
    the index key k is the sum over heads of weight * relu(query . k); a token chooses the `num_chosen` positions with the highest."""

    query: Tensor
    weights: Tensor
    num_chosen: int


class SparseAttention(PagedAttention):
    """Paged attention over chosen positions, for a pool with one plane whose vectors are a key, which is the value too, and behind it an
    index key."""

    @abstractmethod
    def attend_chosen(self, layer: int, query: Tensor, index: IndexQueries, rank: int) -> Tensor:
        """As `attend_latent`, over what `store` was given, with `query` `[T, num_heads, key elements]` and scores scaled by key elements ** -0.5.
        Each token attends to those positions up to its own that `index` chooses, to all while they are not more than `num_chosen`; of
        equal scores the earlier position is chosen. Returns `[T, num_heads, rank]`."""


@dataclass(frozen=True, slots=True, eq=False)
class PlainLayer:
    """A decoder layer as Llama has it, on one rank: a norm, attention with grouped queries, a norm, SwiGLU, each pair's result added to the hidden
    states. Biases may be None; `head_norms` are of queries and of keys before they are rotated."""

    input_norm: Tensor
    qkv: Product
    qkv_bias: Tensor | None
    head_norms: tuple[Tensor, Tensor] | None
    output: Product
    output_bias: Tensor | None
    post_norm: Tensor
    gate_up: Product
    gate_up_bias: Tensor | None
    down: Product
    down_bias: Tensor | None
    num_heads: int
    num_kv_heads: int
    eps: float


class LayerStack(ABC):
    """Plain layers that are run one after the other without a word between them."""

    @abstractmethod
    def run(
        self,
        layers: range,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        attention: PagedAttention,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Run these over `hidden` `[T, hidden_size]`, which is overwritten; `rotation` as in `RotatingAttention`; keys and values are written to
        the pool. Returns what the last of them gives for the tokens `wanted`, int64 `[S]`, as `[S, hidden_size]`; None: for all."""


@dataclass(frozen=True, slots=True, eq=False)
class ClampedExperts:
    """Weights of experts: gate_up `[num_experts, 2 * n, hidden]`, rows of gate and up in turn, down `[num_experts, hidden, n]`, biases
    `[num_experts, 2 * n]` and `[num_experts, hidden]`; for `alpha` and `limit` see `ClampedSwiGLU`."""

    gate_up: Tensor
    gate_up_bias: Tensor
    down: Tensor
    down_bias: Tensor
    alpha: float
    limit: float


class Kernels(ABC):
    """One backend. `group`: the ranks that hold the model together; layers hold their share of the weights and exchange what it gives. `peers`:
    the workers that share their experts, see `model_worker.layers.expert_parallel`. `placement`: what models are made on."""

    flavour: str
    """Names its KV pools, see `KVStore`."""
    kv_layout: KVLayout
    """How its KV pools lie."""
    can_be_captured = False
    """Whether a pass over a batch that lies on the device touches the host nowhere, so that a graph can be made of it."""
    captured_tokens_max = 1 << 62
    """Such a batch has at most so many rows times the longest context."""

    def __init__(self, group: Group = ALONE, peers: Group = ALONE, placement: Placement = ON_CPU) -> None:
        self.group = group
        self.peers = peers
        self.placement = placement

    def kv_store(self, dtype: torch.dtype | None = None) -> KVStore:
        """How pools for these kernels keep numbers; `dtype` is the placement's unless given."""
        return KVStore(dtype or self.placement.dtype, self.flavour, self.kv_layout, self.placement.device)

    def can_share_cache(self, shape: ModelConfig) -> bool:
        """Whether a model of this shape can have its KV in a pool of `kv_store`, beside the model that these kernels were chosen for."""
        return True

    @abstractmethod
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`x @ weight.T + bias`: x `[T, in]`, weight `[out, in]`, bias `[out]`."""

    def pack(self, weight: Tensor) -> Product | None:
        """Take over the loaded weight `[out, in]` of a linear layer in a form of one's own, in 8 bits for example; None: `linear` takes it as it is."""
        return None

    def pack_table(self, weight: Tensor) -> Table | None:
        """As `pack`, for an embedding, or a head, `[vocab, hidden]`."""
        return None

    def stack_layers(self, layers: Sequence[PlainLayer]) -> LayerStack | None:
        """All layers of a model in one piece; None: they are run one by one."""
        return None

    @abstractmethod
    def linear_per_head(self, x: Tensor, weight: Tensor) -> Tensor:
        """`linear` for each head by itself: x `[T, heads, in]`, weight `[heads, out, in]`; returns `[T, heads, out]`."""

    @abstractmethod
    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Rows of `weight` `[vocab, hidden]` for int64 ids `[T]`."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x / sqrt(mean(x ** 2) + eps) * weight` over the last dimension."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`rms_norm` of `residual + x`, and that sum."""
        total = residual + x
        return self.rms_norm(total, weight, eps), total

    @abstractmethod
    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """`(x - mean(x)) / sqrt(var(x) + eps) * weight + bias` over the last dimension."""

    @abstractmethod
    def rotary_embedding(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate `x` `[T, heads, head_dim]` pairing element i with i + head_dim / 2 (NeoX style); cos and sin are float32 `[T, head_dim / 2]`."""

    @abstractmethod
    def silu_and_mul(self, x: Tensor) -> Tensor:
        """`silu(x[:, :n]) * x[:, n:]` for x `[T, 2 * n]`."""

    @abstractmethod
    def topk_softmax(self, logits: Tensor, num_chosen: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        """The experts with the largest softmax of `logits` `[T, num_experts]`: ids int64 `[T, num_chosen]`, and their probabilities, with
        `renormalize` divided by their sum."""

    @abstractmethod
    def biased_grouped_topk(self, logits: Tensor, bias: Tensor, experts: ExpertsConfig) -> tuple[Tensor, Tensor]:
        """Scores are the sigmoid of `logits` `[T, num_experts]`. Chosen are those with the largest score + bias (`[num_experts]`) in the
        groups whose two best such sums add up to the most. Returns ids int64 `[T, num_chosen]` and weights: the scores without bias, with
        `experts.renormalize` divided by their sum, times `experts.scale`."""

    @abstractmethod
    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """The sum over k of `weights[t, k] * (down[e] @ silu_and_mul(gate_up[e] @ x[t]))` with e = `ids[t, k]`: x `[T, hidden]`, ids
        int64 and weights `[T, num_chosen]`, gate_up `[num_experts, 2 * n, hidden]`, down `[num_experts, hidden, n]`. Ids outside `[0,
        num_experts)` are experts of other ranks and add nothing."""

    def pack_experts(self, gate_up: Tensor, down: Tensor) -> ExpertsSum | None:
        """As `pack`, for the weights of `experts`; None: that takes them as they are."""
        return None

    @abstractmethod
    def clamped_experts(self, x: Tensor, ids: Tensor, weights: Tensor, experts: ClampedExperts) -> Tensor:
        """As `experts`, with biases after both products, and `ClampedSwiGLU` between them."""

    def best_tokens(self, logits: Tensor) -> BestTokens:
        """Of `logits`, float32 `[R, vocab]`, where they lie; the first of equals."""
        return first_best(logits)

    @abstractmethod
    def paged_attention(self, batch: Batch, kv: KVPool) -> PagedAttention:
        """Prepare attention for one step."""

    @abstractmethod
    def windowed_attention(self, batch: Batch, kv: KVPool) -> WindowedAttention:
        """Prepare attention with sinks and windows for one step."""

    @abstractmethod
    def sparse_attention(self, batch: Batch, kv: KVPool) -> SparseAttention:
        """Prepare attention over chosen positions for one step."""
