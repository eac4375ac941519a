"""The real engine takes every batch that the scheduler makes of a random life, and gives each request the tokens it has alone.

The engine refuses whatever does not fit what it holds, and its deterministic model reads the whole context of a row from the pool: a
table, a swap's pairs, a fork's copy or a prefix hit that is wrong gives other tokens. So does speculation that is not exact: with it every
request still has, greedy or drawn with its seed, the tokens that steps of one token give.
"""

from collections import Counter

import pytest
from engine_life import Life
from engine_worker import output_alone

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
        seen += moves(life.worker.executed) + Counter(joined=life.worker.num_joined)
    assert seen["copies"] > 0 and seen["zeroed"] > 0 and seen["joined"] > 0, seen
    assert (seen["swap_outs"] > 0) == (seen["swap_ins"] > 0) == (mode == "swap"), seen


class DraftingLife(Life):
    """Greedy and drawn requests, some with penalties, that may stop at a token, which may be masked for a while."""

    def sampling(self) -> dict[str, object]:
        rng = self.rng
        stops = {"min_tokens": rng.choice((0, 3)), "stop_token_ids": (rng.randint(0, 63),)}
        penalties = {"frequency_penalty": rng.choice((0.0, 1.5)), "repetition_penalty": rng.choice((1.0, 1.2))}
        return {"temperature": rng.choice((0.0, 1.0)), "seed": rng.randint(0, 9), **stops, **penalties}

    def alone(self, number: int, length: int) -> list[int]:
        return output_alone(self.prompts[number], length, self.rig.sequence(number).submission.sampling)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_no_token_depends_on_drafts(mode: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(100, 100 + LIVES):
        life = DraftingLife(seed, mode, num_drafts=1 + seed % 3)
        try:
            life.live()
            life.check()
        except BaseException as error:
            error.add_note(f"seed {seed}, mode {mode}")
            raise
        stats = life.rig.scheduler.spec_stats
        seen += moves(life.worker.executed) + Counter(
            accepted=stats.num_accepted, rejected=stats.num_drafts - stats.num_accepted
        )
    assert min(seen["accepted"], seen["rejected"], seen["copies"], seen["zeroed"]) > 0, seen
    assert (seen["swap_outs"] > 0) == (seen["swap_ins"] > 0) == (mode == "swap"), seen
