"""A model whose workers share their experts with others."""

from torch import Tensor

from model_worker.batch import Batch
from model_worker.kv_pool import KVPool
from model_worker.layers.weight_slot import WeightSlot
from model_worker.models.causal_lm import CausalLM
from model_worker.ranks.crew import RankLost
from model_worker.ranks.gloo_group import GlooGroup


class LockstepModel:
    """A `CausalLM` each pass of which is a pass of all `peers`. One that fails cannot be tried again, the others being in the middle of
    theirs: it leaves them, so that theirs fail too, and all of their processes end."""

    def __init__(self, model: CausalLM, peers: GlooGroup) -> None:
        self.config = model.config
        self._model = model
        self._peers = peers

    def slots(self) -> dict[str, WeightSlot]:
        """The model's."""
        return self._model.slots()

    def forward(self, batch: Batch, kv: KVPool) -> Tensor:
        """See `CausalLM`. Raises RankLost."""
        try:
            return self._model.forward(batch, kv)
        except Exception as error:
            self._peers.leave()
            place = f"worker {self._peers.rank} of {self._peers.size}"
            raise RankLost(f"{place} in a lockstep group failed in a pass: {type(error).__name__}: {error}") from error
