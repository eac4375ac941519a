"""A group of ranks, joined by one of torch.distributed's backends."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]  # public, though not marked so
from torch.distributed.distributed_c10d import PrefixStore, Store

from model_worker.group import GroupBroken

LOOPBACK = "127.0.0.1"

TIMEOUT_S = 120.0
"""How long a call waits for the other ranks. They compute the same at the same time, so only a rank that hangs takes so long; one that died is
noticed at once."""


class TorchGroup(ABC):
    """See `Group`. `store` is where the ranks find each other, those of other groups under other names. They reach this one at `interface`, an
    address of this machine; None: that of its host name. Not thread-safe, and no state beside it: several may live in one process."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        name: str = "ranks",
        interface: str | None = LOOPBACK,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._name = name
        self._interface = interface
        self._timeout = timedelta(seconds=timeout_s)
        self._process_group: Any = None  # torch publishes no annotations for its methods

    @classmethod
    def at_file(cls, store: Path, rank: int, size: int) -> Self:
        """Of ranks that find each other by the file `store`; whoever is first makes it."""
        return cls(FileStore(str(store), size), rank, size)

    @staticmethod
    def store_at(address: str, *, is_first: bool) -> Store:
        """A store at HOST:PORT, which the first to use it serves and the others wait for. Raises RuntimeError."""
        host, _, port = address.rpartition(":")
        timeout = timedelta(seconds=TIMEOUT_S)
        return TCPStore(host.strip("[]"), int(port), None, is_first, timeout, wait_for_workers=False)

    def join(self, generation: int) -> None:
        """Meet the others anew, who join the same generation (from 0, each higher than those before); returns when all are there. Raises
        GroupBroken."""
        self.leave()
        try:
            self._process_group = self._connect(PrefixStore(f"{self._name} {generation}", self._store))
        except RuntimeError as error:
            raise GroupBroken(f"rank {self.rank} cannot join the others: {error}") from error

    @abstractmethod
    def _connect(self, store: Store) -> Any:
        """A process group of torch's that finds the others by `store`. Raises RuntimeError."""

    def leave(self) -> None:
        """Go, so that whoever waits for this rank stops waiting. A no-op for one that has not joined."""
        group, self._process_group = self._process_group, None
        if group is not None:
            group.abort()

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Group`."""
        x = x.contiguous()
        self._wait(lambda group: group.allreduce([x]))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        gathered = x.new_empty(self.size, *x.shape)
        self._wait(lambda group: group.allgather([list(gathered)], [x]))
        return gathered

    def gather(self, x: Tensor) -> Tensor | None:
        x = x.contiguous()
        gathered = x.new_empty(self.size, *x.shape) if self.rank == 0 else None
        self._wait(lambda group: group.gather([] if gathered is None else list(gathered), x, 0))
        return gathered

    def reduce_scatter(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        parts = torch.empty_like(x)
        self._wait(lambda group: group.alltoall_base(parts, x, [], []))
        return sum_in_order(parts)

    def wait_until_next_is_gone(self) -> None:
        """Return when the next rank, or this one, has left. Nobody else may use this group."""
        with contextlib.suppress(GroupBroken):
            self._wait(lambda group: group.recv([torch.zeros(1)], (self.rank + 1) % self.size, 0))

    def _wait(self, begin: Callable[[Any], Any]) -> None:
        if self._process_group is None:
            raise GroupBroken(f"rank {self.rank} has left its group")
        try:
            begin(self._process_group).wait()
        except RuntimeError as error:
            raise GroupBroken(f"rank {self.rank} waits for others in vain: {error}") from error


def sum_in_order(parts: Tensor) -> Tensor:
    """The sum over the first dimension, in `parts[0]`."""
    for part in parts[1:]:
        parts[0] += part
    return parts[0]
