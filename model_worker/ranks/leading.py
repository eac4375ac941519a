"""Rank 0's part of a model that several ranks hold: what the engine calls, and the others do too."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from model_worker.batch import Batch
from model_worker.group import GroupBroken
from model_worker.kv_blocks import KVBlocks, Moves
from model_worker.kv_pool import KVPool
from model_worker.layers.weight_slot import WeightSlot
from model_worker.models.causal_lm import CausalLM
from model_worker.ranks.crew import Crew, RankFailed
from model_worker.ranks.orders import Forward, Read


class LeadingModel:
    """A `CausalLM` whose passes the crew runs as well. A pass that fails on any rank fails here, and leaves all ranks ready for the next."""

    def __init__(self, model: CausalLM, crew: Crew) -> None:
        self.config = model.config
        self._model = model
        self._crew = crew

    def slots(self) -> dict[str, WeightSlot]:
        """Rank 0's."""
        return self._model.slots()

    def forward(self, batch: Batch, kv: KVPool) -> Tensor:
        """See `CausalLM`. Raises RankLost, and RankFailed for what another rank alone could not do."""
        self._crew.tell(Forward.of(batch))
        failure: Exception | None = None
        try:
            logits = self._model.forward(batch, kv)
        except Exception as error:  # noqa: BLE001 - raised again once all ranks are ready
            self._crew.group.leave()  # or the others would wait for this rank
            failure = error
        failed = [(rank, answer) for rank, answer in enumerate(self._crew.answers(), 1) if answer.failure]
        if failure is None and not failed:
            return logits
        self._crew.meet_again()
        causes = [f"rank {rank}: {answer.failure}" for rank, answer in failed if not answer.is_consequence]
        if causes and (failure is None or isinstance(failure, GroupBroken)):
            raise RankFailed("; ".join(causes))
        raise failure or RankFailed(f"rank {failed[0][0]}: {failed[0][1].failure}")


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
