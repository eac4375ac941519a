"""How much a scheduler group has to do, and how much room it has: what a leader tells its gateways."""

from dataclasses import dataclass
from enum import Enum


class WorkerState(Enum):
    """Whether a worker takes requests."""

    SERVING = "serving"
    LEAVING = "leaving"  # it is to end: its requests go to others
    DRAINING = "draining"  # an operator wants it empty: its requests go to others
    DRAINED = "drained"  # as DRAINING, and it holds no request
    AWAY = "away"  # it does not answer


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One worker. `used_kv_tokens` are in blocks that requests hold; what the prefix cache alone keeps is free."""

    address: str
    state: WorkerState
    num_running: int = 0
    num_swapped: int = 0
    used_kv_tokens: int = 0
    total_kv_tokens: int = 0


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """The whole group at one moment; sums are over the workers that answer. `num_waiting_uncached_tokens` is an upper bound: of a long
    queue only the first are looked up in the prefix cache. `prefix_hit_rate` is of the tokens looked up since the term began, 0 to 1."""

    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    used_kv_tokens: int = 0
    total_kv_tokens: int = 0
    prefix_hit_rate: float = 0.0
    generation_tokens_per_s: float = 0.0
    num_waiting_uncached_tokens: int = 0
    max_running: int = 0
    workers: tuple[WorkerLoad, ...] = ()
