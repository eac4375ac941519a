"""How many times as fast as the best of the others, by workload and by how exactly the weights are kept."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

CLASSES = {"f32": (32, "f32"), "16 bits or more": (16, "f16"), "any precision": (0, "int8")}
"""By the name of a class: how many bits a weight of a peer in it has at least, and our precision that is compared with them."""


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
    peer: str


def ratio_to_best(ours: Rate, others: Sequence[Rate], bits_min: int) -> Ratio | None:
    """Among those with `bits_min` or more to a weight; None where there is none."""
    best = max((other for other in others if other.bits >= bits_min), key=lambda other: other.median, default=None)
    if best is None:
        return None
    paired = [mine / theirs for mine, theirs in zip(ours.rounds, best.rounds, strict=True)]
    return Ratio(ours.median / best.median, min(paired), max(paired), best.name)


def ratios(ours: Mapping[str, Rate], others: Sequence[Rate]) -> dict[str, dict[str, float | str]]:
    """Of one workload, by class. `ours` by precision; a class is left out where our rate or a peer's is missing."""
    told = {}
    for name, (bits_min, precision) in CLASSES.items():
        ratio = ratio_to_best(ours[precision], others, bits_min) if precision in ours else None
        if ratio is not None:
            told[name] = {key: round(value, 3) if isinstance(value, float) else value for key, value in asdict(ratio).items()}
    return told
