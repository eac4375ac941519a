"""Which worker takes a request: pure functions of what each of them has to do and holds already."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

TOKENS_PER_REQUEST = 64
"""What one more neighbour costs, in positions computed: it decodes about so many tokens beside us (the default of `max_tokens`)."""


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One worker that has room for the request in question."""

    num_requests: int  # that run there, or are to run there next
    num_tokens: int  # whose KV they hold
    num_cached_tokens: int  # the first ones of the request that need not be computed there


Choice: TypeAlias = Callable[[Sequence[WorkerLoad], int], int]
"""(workers with room, at least one; how many choices were made before) -> index of the one that takes the request."""


def round_robin(loads: Sequence[WorkerLoad], turn: int) -> int:
    """One after the other, as far as they have room."""
    return turn % len(loads)


def least_requests(loads: Sequence[WorkerLoad], turn: int) -> int:
    """The one with the fewest requests, of these the one with the fewest tokens."""
    return min(range(len(loads)), key=lambda index: (loads[index].num_requests, loads[index].num_tokens))


def least_tokens(loads: Sequence[WorkerLoad], turn: int) -> int:
    """The one whose requests hold the fewest tokens, of these the one with the fewest requests."""
    return min(range(len(loads)), key=lambda index: (loads[index].num_tokens, loads[index].num_requests))


def prefix_aware(loads: Sequence[WorkerLoad], turn: int) -> int:
    """The one with the longest cached prefix, unless it has so many more requests that they cost more than the prefix saves; where
    prefixes are alike, `least_requests`."""

    def cost(index: int) -> tuple[int, int, int]:
        load = loads[index]
        return TOKENS_PER_REQUEST * load.num_requests - load.num_cached_tokens, load.num_requests, load.num_tokens

    return min(range(len(loads)), key=cost)


CHOICES: dict[str, Choice] = {
    "prefix_aware": prefix_aware,
    "least_requests": least_requests,
    "least_tokens": least_tokens,
    "round_robin": round_robin,
}
"""By the names of `Config.worker_choice`."""
