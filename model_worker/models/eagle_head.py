"""EAGLE (arXiv:2401.15077) and EAGLE-3 (arXiv:2503.01840): one layer that goes on from the model's hidden states.

Both take what the model had at a position and the token behind it, and what they have there themselves for every further token.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from model_worker.batch import Batch
from model_worker.kernels.interface import Kernels
from model_worker.kv_pool import KVPool
from model_worker.layers.attention import Attention
from model_worker.layers.decoder import Decoder
from model_worker.layers.embedding import Embedding
from model_worker.layers.linear import Linear
from model_worker.layers.mlp import MLP
from model_worker.layers.rms_norm import RMSNorm
from model_worker.layers.rotary import RotaryEmbedding
from model_worker.layers.weight_slot import WeightSlot
from model_worker.models.model_config import ModelConfig

LAYER = "layers.0"

NEVER = -1e30
"""The logit of an id that a head does not know."""


@dataclass(frozen=True, slots=True, eq=False)
class EagleShape:
    """`config` is the layer's, as a Llama's of one layer. Of EAGLE-3: `taps`, see `TappedLM`; `token_ids` int64 `[draft vocabulary]`, the
    model's ids of the head's, None for all; `normed_residual`: the residual is the normalised hidden state."""

    config: ModelConfig
    taps: tuple[int, ...] = ()
    token_ids: Tensor | None = None
    normed_residual: bool = False


class _Part(Protocol):
    """Has weights of its own."""

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """Checkpoint name -> where it goes."""
        ...


class _EagleLayer(ABC):
    """What both have in common: attention and a feed-forward part, an embedding, a head, the last two the target's unless they are among the names
    `given`."""

    num_layers = 1

    def __init__(
        self, shape: EagleShape, kernels: Kernels, target: Decoder, given: Collection[str], attention_inputs: int
    ) -> None:
        config = shape.config
        self.taps = shape.taps
        self.hidden_size = config.hidden_size
        self.kv_shape = config.kv_shape_of(kernels.group)
        self._kernels = kernels
        self._rotary = RotaryEmbedding(config.rotary_dim or config.head_dim, config.rope_theta, config.rope_scaling)
        self._attention = Attention(config, kernels, config.attention_bias, attention_inputs)
        self._post_attention_norm = RMSNorm(kernels, config.hidden_size, config.rms_norm_eps)
        self._mlp = MLP(kernels, config.hidden_size, config.intermediate_size, config.mlp_bias)
        self._parts: dict[str, _Part] = {
            f"{LAYER}.self_attn": self._attention,
            f"{LAYER}.post_attention_layernorm": self._post_attention_norm,
            f"{LAYER}.mlp": self._mlp,
        }
        self._embedding, self._head = target.embedding, target.head
        if "embed_tokens.weight" in given:
            self._parts["embed_tokens"] = self._embedding = Embedding(kernels, config.vocab_size, config.hidden_size)
        if "lm_head.weight" in given:
            size = config.vocab_size if shape.token_ids is None else len(shape.token_ids)
            self._parts["lm_head"] = self._head = Embedding(kernels, size, config.hidden_size)

    def slots(self) -> dict[str, WeightSlot]:
        """Checkpoint name -> where it goes."""
        slots: dict[str, WeightSlot] = {}
        for prefix, part in self._parts.items():
            slots |= {name.removeprefix("."): slot for name, slot in part.slots(prefix).items()}
        return slots

    def forward(self, batch: Batch, hidden: Tensor, before: Tensor, kv: KVPool) -> Tensor:
        """See `DraftHead`."""
        take = self._kernels.placement.take
        attention, rotation = self._kernels.paged_attention(batch, kv), self._rotary(take(batch.positions))
        residual, x = self._inputs(self._embedding(take(batch.input_ids)), hidden)
        hidden = residual + self._attention(x, rotation, attention, 0)
        return (hidden + self._mlp(self._post_attention_norm(hidden))).unsqueeze(0)

    @abstractmethod
    def _inputs(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The residual `[T, hidden_size]` and what attention takes."""


class EagleHead(_EagleLayer):
    """See `DraftHead`. `fc` joins embedding and hidden state; there is no norm in front of attention, and none in front of the head."""

    def __init__(self, shape: EagleShape, kernels: Kernels, target: Decoder, given: Collection[str]) -> None:
        size = shape.config.hidden_size
        super().__init__(shape, kernels, target, given, size)
        self.tapped_size = size
        self._join = Linear(kernels, 2 * size, {"fc": size}, bias="fc.bias" in given)
        self._parts[""] = self._join

    def enter(self, tapped: Tensor) -> Tensor:
        """The model's last hidden states as they are."""
        return tapped

    def logits(self, hidden: Tensor, layer: int) -> Tensor:
        """See `DraftHead`."""
        return self._head.logits(hidden)

    def _inputs(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        x = self._join(torch.cat((embedded, hidden), dim=1))
        return x, x


class Eagle3Head(_EagleLayer):
    """See `DraftHead`. `fc` makes one vector of the hidden states of three of the model's layers; attention takes the normalised embedding beside
    the normalised hidden state. The head may know some of the ids only. `target_size` is the model's hidden size."""

    def __init__(self, shape: EagleShape, kernels: Kernels, target: Decoder, given: Collection[str], target_size: int) -> None:
        size, eps = shape.config.hidden_size, shape.config.rms_norm_eps
        super().__init__(shape, kernels, target, given, 2 * size)
        self._vocab_size = shape.config.vocab_size
        self._token_ids = None if shape.token_ids is None else kernels.placement.take(shape.token_ids)
        self._normed_residual = shape.normed_residual
        self.tapped_size = len(shape.taps) * target_size
        self._join = Linear(kernels, self.tapped_size, {"fc": size}, bias="fc.bias" in given)
        self._token_norm, self._hidden_norm, self._norm = (RMSNorm(kernels, size, eps) for _ in range(3))
        norms = {f"{LAYER}.input_layernorm": self._token_norm, f"{LAYER}.hidden_norm": self._hidden_norm, "norm": self._norm}
        self._parts |= {"": self._join, **norms}

    def enter(self, tapped: Tensor) -> Tensor:
        """One vector of three."""
        return self._join(tapped)

    def logits(self, hidden: Tensor, layer: int) -> Tensor:
        """See `DraftHead`."""
        known = self._head.logits(self._norm(hidden))
        if self._token_ids is None:
            return known
        return known.new_full((len(known), self._vocab_size), NEVER).index_copy_(1, self._token_ids, known)

    def _inputs(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        normed = self._hidden_norm(hidden)
        return normed if self._normed_residual else hidden, torch.cat((self._token_norm(embedded), normed), dim=1)
