"""What a rank other than 0 holds and does: its part of the weights and of every KV block, and the orders of rank 0."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import numpy as np
import torch
from torch import Tensor

from model_worker.group import GroupBroken
from model_worker.kv_blocks import KVBlocks, Moves
from model_worker.kv_pool import KVPool
from model_worker.models.causal_lm import CausalLM
from model_worker.placement import ON_CPU, Placement
from model_worker.ranks.orders import Answer, Forward, HeadForward, HeadLogits, Join, Order, Read, receive, send
from model_worker.ranks.torch_group import TorchGroup
from model_worker.speculation.draft_head import DraftHead

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A rank's part of a model and of its KV. It knows no sequences: rank 0 alone samples, and says which positions to compute where."""

    model: CausalLM
    kv: KVPool
    blocks: KVBlocks
    group: TorchGroup
    head: DraftHead | None = None  # of layers that draft, with KV in the pool paired with `kv`
    placement: Placement = ON_CPU  # of the weights

    def serve(self, line: Connection) -> None:
        """Carry out the orders that come over `line`, until rank 0 is gone. Raises GroupBroken where the ranks cannot meet again."""
        while True:
            try:
                order: Order = receive(line)
                answer = self._obey(order)
                if answer is not None:
                    send(line, answer)
            except (EOFError, OSError):
                self.group.leave()
                return

    def _obey(self, order: Order) -> Answer | None:
        match order:
            case Forward():
                return self._compute(lambda: self.model.forward(order.batch(), self.kv))
            case HeadForward() | HeadLogits():
                return self._compute(partial(self._draft, order))
            case Moves():
                self.blocks.move(order)
                return None
            case Read(block_ids, is_host):
                return Answer(blocks=tuple(self.blocks.read(block_ids, is_host=is_host)))
            case Join(generation):
                self.group.join(generation)
                return Answer()

    def _draft(self, order: HeadForward | HeadLogits) -> Tensor:
        """This rank's part of what rank 0's `DraftHead` does."""
        assert self.head is not None and self.kv.paired is not None, "rank 0 has a head, so every rank has"
        hidden = self._placed(order.hidden)
        if isinstance(order, HeadLogits):
            return self.head.logits(hidden, order.layer)
        return self.head.forward(order.batch.batch(), hidden, self._placed(order.before), self.kv.paired)

    def _placed(self, hidden: np.ndarray) -> Tensor:
        return torch.from_numpy(hidden).to(self.placement.device, self.placement.dtype)

    @torch.inference_mode()
    def _compute(self, part: Callable[[], Tensor]) -> Answer:
        """Carry out this rank's part of a pass."""
        try:
            part()
        except Exception as error:  # noqa: BLE001 - rank 0 hears of it, and decides
            self.group.leave()  # or the others would wait for this rank
            is_consequence = isinstance(error, GroupBroken)
            if not is_consequence:
                _log.warning("rank %d failed: %s", self.group.rank, error, exc_info=error)
            return Answer(f"{type(error).__name__}: {error}", is_consequence)
        return Answer()
