"""The workers of a lockstep group that share their experts: how they find each other, and notice that one is gone."""

import threading
from collections.abc import Callable

from model_worker.group import GroupBroken
from model_worker.ranks.crew import RankLost
from model_worker.ranks.gloo_group import GlooGroup
from model_worker.ranks.torch_group import LOOPBACK
from services.worker.config import WorkerConfig
from services.worker.device_choice import DeviceChoice
from services.worker.rank_groups import peer_group

WATCH_S = 10 * 365 * 86400.0
"""How long a worker may wait for a word of its neighbour, which never comes."""

ANY_INTERFACE = ("", "0.0.0.0", "[::]", "::")


class ExpertPeers:
    """The groups of one rank of one worker with the same rank of the other workers. Each has yet to join."""

    def __init__(self, config: WorkerConfig, tensor_rank: int, choice: DeviceChoice) -> None:
        """Raises RankLost where the store cannot be had."""
        experts = config.experts
        address, size, rank = experts.expert_parallel_store, experts.expert_parallel_size, experts.expert_parallel_rank
        host = config.listen.rpartition(":")[0]
        interface = None if host in ANY_INTERFACE or config.listen.startswith("unix:") else host.strip("[]")
        if address.rpartition(":")[0] == LOOPBACK:
            interface = LOOPBACK
        try:
            store = GlooGroup.store_at(address, is_first=rank == tensor_rank == 0)
        except RuntimeError as error:
            raise RankLost(f"expert_parallel_store {address} cannot be had: {error}") from error
        self.group = peer_group(choice)(store, rank, size, f"experts {tensor_rank}", interface)
        self._watch_group = GlooGroup(store, rank, size, f"watch {tensor_rank}", interface, WATCH_S)

    def join(self, lose: Callable[[str], None] | None = None) -> None:
        """Meet the others. From then on `lose` is told, in a thread of its own, of a neighbour that is gone: each watches the next, so that all
        hear of it one after the other. Raises RankLost where they do not come."""
        try:
            self.group.join(0)
            self._watch_group.join(0)
        except GroupBroken as error:
            raise RankLost(str(error)) from error
        if lose is not None:
            threading.Thread(target=self._watch, args=(lose,), name="expert peers", daemon=True).start()

    def _watch(self, lose: Callable[[str], None]) -> None:
        self._watch_group.wait_until_next_is_gone()
        lose(f"worker {(self.group.rank + 1) % self.group.size} of {self.group.size} in the lockstep group is gone")
