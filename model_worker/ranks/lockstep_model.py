"""A model whose workers share their experts with others."""

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from torch import Tensor

from model_worker.batch import Batch
from model_worker.kv_pool import KVPool
from model_worker.layers.weight_slot import WeightSlot
from model_worker.models.causal_lm import CausalLM, TappedLM
from model_worker.ranks.crew import RankLost
from model_worker.ranks.torch_group import TorchGroup

T = TypeVar("T")


class LockstepModel:
    """A `CausalLM`, or a `TappedLM`, each pass of which is a pass of all `peers`. One that fails cannot be tried again, the others being in the middle of
    theirs: it leaves them, so that theirs fail too, and all of their processes end."""

    def __init__(self, model: CausalLM, peers: TorchGroup) -> None:
        self.config = model.config
        self._model = model
        self._peers = peers

    def slots(self) -> dict[str, WeightSlot]:
        """The model's."""
        return self._model.slots()

    def forward(self, batch: Batch, kv: KVPool) -> Tensor:
        """See `CausalLM`. Raises RankLost."""
        return self._in_step(lambda: self._model.forward(batch, kv))

    def forward_tapped(self, batch: Batch, kv: KVPool, taps: Sequence[int]) -> tuple[Tensor, Tensor]:
        """See `TappedLM`. Raises RankLost."""
        return self._in_step(lambda: cast(TappedLM, self._model).forward_tapped(batch, kv, taps))

    def _in_step(self, compute: Callable[[], T]) -> T:
        try:
            return compute()
        except Exception as error:
            self._peers.leave()
            place = f"worker {self._peers.rank} of {self._peers.size}"
            raise RankLost(f"{place} in a lockstep group failed in a pass: {type(error).__name__}: {error}") from error
