"""Who makes room when blocks run out: pure functions of the running sequences that may be asked to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Candidate:
    """One running sequence that is behind the one that needs blocks, and has no row in this step."""

    priority: int  # lower is more important
    admission: int  # number of its latest admission; higher is later
    num_remaining: int  # output tokens that it can still sample, at most
    num_cached_tokens: int  # the first of its tokens whose blocks stay in the prefix cache when it gives them up


VictimChoice: TypeAlias = Callable[[Sequence[Candidate]], int]
"""(candidates, at least one) -> index of the one that makes room."""


def fcfs(candidates: Sequence[Candidate]) -> int:
    """The latest admitted: it has done the least."""
    return max(range(len(candidates)), key=lambda index: candidates[index].admission)


def priority(candidates: Sequence[Candidate]) -> int:
    """The one with the largest priority number, of these the latest admitted."""
    return max(range(len(candidates)), key=lambda index: (candidates[index].priority, candidates[index].admission))


def shortest_remaining(candidates: Sequence[Candidate]) -> int:
    """The one with the most tokens to come, so that the shortest end first and give up their blocks; of equals the latest admitted."""
    return max(range(len(candidates)), key=lambda index: (candidates[index].num_remaining, candidates[index].admission))


def recompute(candidates: Sequence[Candidate]) -> int:
    """The one with the largest cached prefix, which is not computed again unless its blocks are needed as well; of equals the latest
    admitted."""
    return max(range(len(candidates)), key=lambda index: (candidates[index].num_cached_tokens, candidates[index].admission))


VICTIM_CHOICES: dict[str, VictimChoice] = {
    "fcfs": fcfs,
    "priority": priority,
    "shortest_remaining": shortest_remaining,
    "recompute": recompute,
}
"""By the names of `Config.preemption_policy`."""
