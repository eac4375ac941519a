"""What rank 0 tells the other ranks, and what they answer: plain values and arrays, so that they can be sent to another process."""

import pickle
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from model_worker.batch import Batch
from model_worker.gpu_memory import GPUMemory
from model_worker.kv_blocks import Moves


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """Compute a batch together with the others. `values` are the fields of the `Batch`, tensors as arrays."""

    values: dict[str, Any]

    @classmethod
    def of(cls, batch: Batch) -> "Forward":
        """The order that asks for `batch`."""
        values = {item.name: getattr(batch, item.name) for item in fields(batch)}
        return cls({name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in values.items()})

    def batch(self) -> Batch:
        """The batch asked for."""
        values: dict[str, Any] = {
            name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in self.values.items()
        }
        return Batch(**values)


@dataclass(frozen=True, slots=True, eq=False)
class HeadForward:
    """Compute a batch with the layers that draft, see `DraftHead.forward`: `hidden` float32 `[T, hidden_size]`, `before` float32
    `[n - 1, R, hidden_size]`."""

    batch: Forward
    hidden: np.ndarray
    before: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class HeadLogits:
    """Compute this rank's part of `DraftHead.logits`: `hidden` float32 `[S, hidden_size]`."""

    hidden: np.ndarray
    layer: int


@dataclass(frozen=True, slots=True)
class Read:
    """Answer with this rank's part of some blocks, see `KVBlocks.read`."""

    block_ids: tuple[int, ...]
    is_host: bool


@dataclass(frozen=True, slots=True)
class Join:
    """Meet in a new group, see `TorchGroup.join`: all have loaded their parts (generation 0), or a pass has failed somewhere."""

    generation: int


Order = Forward | HeadForward | HeadLogits | Moves | Read | Join
"""`Moves` is answered by nothing, the others by an `Answer`."""


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Said once to a rank that has met the others, before any order: the blocks of its pool and of its host pool."""

    num_blocks: int
    num_host_blocks: int


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """The order has been carried out, unless `failure` says why not: in words, with `is_consequence` where only the others' failing made this
    one fail. `blocks` is what a `Read` asked for; `memory` what a rank on a GPU says of its own accord once it has met the others."""

    failure: str = ""
    is_consequence: bool = False
    blocks: tuple[np.ndarray, ...] = ()
    memory: GPUMemory | None = None


def send(line: Connection, message: object) -> None:
    """Send `message`. Raises OSError where nobody is at the other end."""
    line.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def receive(line: Connection) -> Any:
    """Wait for the next message. Raises EOFError or OSError where nobody is at the other end."""
    return pickle.loads(line.recv_bytes())
