"""What a rank other than 0 holds and does: its part of the weights and of every KV block, and the orders of rank 0."""

import logging
from dataclasses import dataclass
from multiprocessing.connection import Connection

from model_worker.group import GroupBroken
from model_worker.kv_blocks import KVBlocks, Moves
from model_worker.kv_pool import KVPool
from model_worker.models.causal_lm import CausalLM
from model_worker.ranks.gloo_group import GlooGroup
from model_worker.ranks.orders import Answer, Forward, Join, Order, Read, receive, send

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A rank's part of a model and of its KV. It knows no sequences: rank 0 alone samples, and says which positions to compute where."""

    model: CausalLM
    kv: KVPool
    blocks: KVBlocks
    group: GlooGroup

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
                return self._forward(order)
            case Moves():
                self.blocks.move(order)
                return None
            case Read(block_ids, is_host):
                return Answer(blocks=tuple(self.blocks.read(block_ids, is_host=is_host)))
            case Join(generation):
                self.group.join(generation)
                return Answer()

    def _forward(self, order: Forward) -> Answer:
        try:
            self.model.forward(order.batch(), self.kv)
        except Exception as error:  # noqa: BLE001 - rank 0 hears of it, and decides
            self.group.leave()  # or the others would wait for this rank
            is_consequence = isinstance(error, GroupBroken)
            if not is_consequence:
                _log.warning("rank %d failed: %s", self.group.rank, error, exc_info=error)
            return Answer(f"{type(error).__name__}: {error}", is_consequence)
        return Answer()
