"""The port to layers that guess further tokens from the hidden states of the model."""

from typing import Protocol

from torch import Tensor

from model_worker.batch import Batch
from model_worker.kv_pool import KVPool
from model_worker.kv_shape import KVShape
from model_worker.layers.weight_slot import WeightSlot


class DraftHead(Protocol):
    """`num_layers` (n) layers of attention, each with KV of its own in a pool of `kv_shape`. With what the model had at position p (`enter`),
    and the token at p + 1, layer 0 says what the token at p + 2 is; with what layer i had at position p, and the token at p + 2, layer i + 1
    says what the one at p + 3 is. A layer keeps all that under the position in front of the token that goes in.

    `taps`: the hidden states of the model that it builds on, see `TappedLM`; `tapped_size` numbers for each token.
    """

    taps: tuple[int, ...]
    tapped_size: int
    num_layers: int
    hidden_size: int
    kv_shape: KVShape

    def slots(self) -> dict[str, WeightSlot]:
        """Checkpoint name -> where it goes."""
        ...

    def enter(self, tapped: Tensor) -> Tensor:
        """What layer 0 takes, `[T, hidden_size]`, of the model's hidden states `[T, W]`."""
        ...

    def forward(self, batch: Batch, hidden: Tensor, before: Tensor, kv: KVPool) -> Tensor:
        """What each layer has at every token of the batch, `[n, T, hidden_size]`. `hidden` `[T, hidden_size]` goes into layer 0; `before`
        `[n - 1, R, hidden_size]` is what the layers but the last had at the position before each row's first."""
        ...

    def logits(self, hidden: Tensor, layer: int) -> Tensor:
        """Float32 logits `[S, vocab_size]` of what a layer had, `[S, hidden_size]`."""
        ...
