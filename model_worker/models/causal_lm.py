"""What the engine needs of a model."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from model_worker.batch import Batch
from model_worker.kv_pool import KVPool
from model_worker.layers.weight_slot import WeightSlot
from model_worker.models.model_config import ModelConfig


class CausalLM(Protocol):
    """A model that continues token sequences. Its weights are uninitialised until every slot has been copied into."""

    config: ModelConfig

    def slots(self) -> dict[str, WeightSlot]:
        """Checkpoint name (Hugging Face naming) -> where its weight goes, or which part of it."""
        ...

    def forward(self, batch: Batch, kv: KVPool) -> Tensor:
        """Compute the batch, writing its keys and values to `kv`. Returns float32 logits `[S, vocab_size]` of `batch.logits_rows`."""
        ...


class TappedLM(CausalLM, Protocol):
    """A model that shows its hidden states, for whoever guesses from them what it will say."""

    def forward_tapped(self, batch: Batch, kv: KVPool, taps: Sequence[int]) -> tuple[Tensor, Tensor]:
        """`forward`, with the hidden states of all T tokens beside the logits: without `taps` those behind the last norm, `[T, hidden_size]`;
        else what goes into each of these layers, side by side, `[T, len(taps) * hidden_size]`."""
        ...
