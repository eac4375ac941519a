"""Rank 0's part of a model that several ranks hold: what the engine calls, and the others do too."""

from collections.abc import Sequence
from typing import cast

import numpy as np
from torch import Tensor

from model_worker.batch import Batch
from model_worker.kv_blocks import KVBlocks, Moves
from model_worker.kv_pool import KVPool
from model_worker.layers.weight_slot import WeightSlot
from model_worker.models.causal_lm import CausalLM, TappedLM
from model_worker.ranks.crew import Crew
from model_worker.ranks.orders import Forward, HeadForward, HeadLogits, Read
from model_worker.speculation.draft_head import DraftHead


class LeadingModel:
    """A `CausalLM`, or a `TappedLM`, whose passes the crew runs as well. A pass that fails on any rank fails here, and leaves all ranks ready for the
    next."""

    def __init__(self, model: CausalLM, crew: Crew) -> None:
        self.config = model.config
        self._model = model
        self._crew = crew

    def slots(self) -> dict[str, WeightSlot]:
        """Rank 0's."""
        return self._model.slots()

    def forward(self, batch: Batch, kv: KVPool) -> Tensor:
        """See `CausalLM`. Raises RankLost, and RankFailed for what another rank alone could not do."""
        return self._crew.together(Forward.of(batch), lambda: self._model.forward(batch, kv))

    def forward_tapped(self, batch: Batch, kv: KVPool, taps: Sequence[int]) -> tuple[Tensor, Tensor]:
        """See `TappedLM`: hidden states are the same on all ranks, and rank 0's are looked at. Raises as `forward` does."""
        model = cast(TappedLM, self._model)
        return self._crew.together(Forward.of(batch), lambda: model.forward_tapped(batch, kv, taps))


class LeadingHead:
    """A `DraftHead` of which each rank holds a part, as of the model; `head` is rank 0's. Its methods raise as those of `LeadingModel` do."""

    def __init__(self, head: DraftHead, crew: Crew) -> None:
        self.taps = head.taps
        self.tapped_size = head.tapped_size
        self.num_layers = head.num_layers
        self.hidden_size = head.hidden_size
        self.kv_shape = head.kv_shape
        self._head = head
        self._crew = crew

    def slots(self) -> dict[str, WeightSlot]:
        """Rank 0's."""
        return self._head.slots()

    def enter(self, tapped: Tensor) -> Tensor:
        """See `DraftHead`: every rank has all weights of this, and rank 0 computes it."""
        return self._head.enter(tapped)

    def forward(self, batch: Batch, hidden: Tensor, before: Tensor, kv: KVPool) -> Tensor:
        """See `DraftHead`."""
        order = HeadForward(Forward.of(batch), _sent(hidden), _sent(before))
        return self._crew.together(order, lambda: self._head.forward(batch, hidden, before, kv))

    def logits(self, hidden: Tensor, layer: int) -> Tensor:
        """See `DraftHead`."""
        return self._crew.together(HeadLogits(_sent(hidden), layer), lambda: self._head.logits(hidden, layer))


def _sent(hidden: Tensor) -> np.ndarray:
    """On the host, in float32, which holds every number of fewer bits."""
    values: np.ndarray = hidden.float().cpu().numpy()
    return values


class LeadingBlocks:
    """`KVBlocks` of which each rank holds the heads it needs; `local` are rank 0's."""

    def __init__(self, local: KVBlocks, num_kv_heads: int, crew: Crew) -> None:
        self._local = local
        self._crew = crew
        self._ranks_per_head = max(1, crew.group.size // num_kv_heads)

    def move(self, moves: Moves) -> None:
        self._crew.tell(moves)
        self._local.move(moves)

    def read(self, block_ids: Sequence[int], *, is_host: bool) -> list[np.ndarray]:
        self._crew.tell(Read(tuple(block_ids), is_host))
        parts = [self._local.read(block_ids, is_host=is_host), *(answer.blocks for answer in self._crew.answers())]
        return [np.concatenate(each, axis=3) for each in zip(*parts[:: self._ranks_per_head], strict=True)]
