"""How many times as fast as the best of the others, by workload and by how exactly the weights are kept."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

CLASSES = {"f32": (32, 32), "16 bits or more": (16, 16), "any precision": (0, 8)}
"""By the name of a class: how many bits a weight of a peer in it has at least, and how many one of ours that is compared with them."""

LOST_BELOW = 0.5
"""A peer with less than this part of the best rate of its class has lost: noise does not double a rate."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Of one contender in one workload: output tokens per second in every round, in their order; `bits` of each weight."""

    name: str
    bits: int
    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Over the rounds."""
        return statistics.median(self.rounds)


@dataclass(frozen=True, slots=True)
class Ratio:
    """Of our median to that of the best peer; `lowest` and `highest` are of single rounds, each with the peer's of the same round."""

    ratio: float
    lowest: float
    highest: float
    ours: str
    peer: str


def best_of(rates: Sequence[Rate], bits_min: int, bits_max: int = 64) -> Rate | None:
    """The one with the highest median, among those with so many bits to a weight; None where there is none."""
    fitting = (rate for rate in rates if bits_min <= rate.bits <= bits_max)
    return max(fitting, key=lambda rate: rate.median, default=None)


def has_lost(peer: Rate, peers: Sequence[Rate]) -> bool:
    """Whether it cannot be the best of any class any more. The best of those with no fewer bits is in all classes that it is in."""
    best = best_of(peers, peer.bits)
    return best is not None and peer.median < LOST_BELOW * best.median


def ratio_to_best(ours: Rate, others: Sequence[Rate], bits_min: int) -> Ratio | None:
    """Among those with `bits_min` or more to a weight that ran as many rounds; None where there is none."""
    best = best_of([other for other in others if len(other.rounds) == len(ours.rounds)], bits_min)
    if best is None:
        return None
    paired = [mine / theirs for mine, theirs in zip(ours.rounds, best.rounds, strict=True)]
    return Ratio(ours.median / best.median, min(paired), max(paired), ours.name, best.name)


def ratios(ours: Sequence[Rate], others: Sequence[Rate]) -> dict[str, dict[str, float | str]]:
    """Of one workload, by class: the best of ours with its bits. A class is left out where ours or the peers are missing."""
    told = {}
    for name, (bits_min, bits) in CLASSES.items():
        mine = best_of(ours, bits, bits)
        ratio = ratio_to_best(mine, others, bits_min) if mine is not None else None
        if ratio is not None:
            told[name] = {key: round(value, 3) if isinstance(value, float) else value for key, value in asdict(ratio).items()}
    return told
