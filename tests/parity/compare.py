"""Compares greedy outputs token by token; past a difference it goes on from the reference's token (teacher forcing)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.parity.reference import Expected

NEAR_TIE_GAP = 1e-4
"""The two best logits of the reference lie at most this far apart: float32 rounding may decide between them."""

Place = tuple[int, int]
"""(prompt, output index)."""


@dataclass
class Differences:
    """Where outputs differed, and how often."""

    near_ties: set[Place] = field(default_factory=set)
    mismatches: set[Place] = field(default_factory=set)


def compare(
    prompts: Sequence[list[int]],
    expected: Sequence[Expected],
    generate: Callable[[list[list[int]], list[int]], list[list[int]]],
) -> Differences:
    """`generate(prompts, max_tokens)` gives the outputs of several prompts at once. A prompt with a difference is generated again,
    behind the reference's tokens up to it, until all of its places are compared."""
    differences = Differences()
    begun = dict.fromkeys(range(len(prompts)), 0)  # prompt -> output tokens that are compared already
    while begun:
        starts = [prompts[i] + expected[i].token_ids[:done] for i, done in begun.items()]
        counts = [len(expected[i].token_ids) - done for i, done in begun.items()]
        rest = {}
        for (i, done), output in zip(begun.items(), generate(starts, counts), strict=True):
            place = next((p for p, token in enumerate(output, done) if token != expected[i].token_ids[p]), None)
            if place is None:
                assert len(output) == len(expected[i].token_ids) - done, "every token asked for was generated"
                continue
            is_tie = expected[i].gaps[place] <= NEAR_TIE_GAP and output[place - done] == expected[i].second_ids[place]
            (differences.near_ties if is_tie else differences.mismatches).add((i, place))
            if place + 1 < len(expected[i].token_ids):
                rest[i] = place + 1
        begun = rest
    return differences
