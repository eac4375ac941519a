"""The real engine takes every batch that the scheduler makes of a random life, and gives each request the tokens it has alone.

The engine refuses whatever does not fit what it holds, and its deterministic model reads the whole context of a row from the pool: a
table, a swap's pairs, a fork's copy or a prefix hit that is wrong gives other tokens.
"""

from collections import Counter

import pytest
from engine_life import Life

from tessera.values.batch import ScheduledBatch

LIVES = 25


def moves(batches: list[ScheduledBatch]) -> Counter[str]:
    """How many swaps, copies and zeroed blocks the batches had."""
    return Counter(
        swap_outs=sum(len(batch.swap_outs) for batch in batches),
        swap_ins=sum(len(batch.swap_ins) for batch in batches),
        copies=sum(len(batch.copies) for batch in batches),
        zeroed=sum(len(batch.zero_blocks) for batch in batches),
    )


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_the_engine_takes_whatever_the_scheduler_sends(mode: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(LIVES):
        life = Life(seed, mode)
        try:
            life.live()
            life.check()
        except BaseException as error:
            error.add_note(f"seed {seed}, mode {mode}")
            raise
        seen += moves(life.worker.executed)
    assert seen["copies"] > 0 and seen["zeroed"] > 0, seen
    assert (seen["swap_outs"] > 0) == (seen["swap_ins"] > 0) == (mode == "swap"), seen
