"""What the engine needs of a model."""

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
