"""What a scenario came to, and how it is told."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.chaos.aftermath import Aftermath
from tests.chaos.kv_check import KVVerdict
from tests.chaos.scenarios import Scenario
from tests.chaos.setups import Setup
from tests.chaos.stream_log import StreamLog
from tests.chaos.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Pauses:
    """Longest gaps of the streams after a fault, seconds; all 0 where no stream was under way."""

    p50_s: float = 0.0
    p99_s: float = 0.0
    max_s: float = 0.0

    @classmethod
    def of(cls, logs: Sequence[StreamLog], after_s: float) -> "Pauses":
        """Over the streams that had begun by `after_s` and went on after it."""
        return cls._over([log for log in logs if log.piece_times_s and log.piece_times_s[0] <= after_s], after_s)

    @classmethod
    def ordinary(cls, logs: Sequence[StreamLog]) -> "Pauses":
        """Of streams that nothing happened to."""
        return cls._over(logs, float("-inf"))

    @classmethod
    def _over(cls, logs: Sequence[StreamLog], after_s: float) -> "Pauses":
        found = [gap for log in logs if (gap := log.longest_gap_s(after_s)) is not None]
        if not found:
            return cls()
        p50, p99 = np.percentile(found, [50, 99])
        return cls(float(p50), float(p99), max(found))


@dataclass(frozen=True, slots=True)
class Outcome:
    """One scenario on one setup. `failure` is why it could not be played to its end, empty where it was."""

    setup: Setup
    scenario: Scenario
    seconds: float
    pauses: Pauses = field(default_factory=Pauses)
    verdict: Verdict = field(default_factory=Verdict)
    aftermath: Aftermath = field(default_factory=Aftermath)
    kv: KVVerdict = field(default_factory=KVVerdict)
    failure: str = ""

    @property
    def is_clean(self) -> bool:
        """Whether nothing was lost, repeated, wrong, leaked or left."""
        return not self.failure and self.verdict.is_clean and self.aftermath.is_clean and self.kv.is_clean

    @property
    def pause_budget_s(self) -> float | None:
        """What the 99th percentile of the pauses may be; None for no bound."""
        budget_s = self.scenario.pause_budget_s
        if budget_s is None or not self.setup.has_pause_budget:
            return None
        return budget_s + (self.setup.recompute_s if self.scenario.loses_worker else 0.0)

    @property
    def is_over_budget(self) -> bool:
        """Whether streams paused for longer than they may."""
        return self.pause_budget_s is not None and self.pauses.p99_s > self.pause_budget_s

    @property
    def complaints(self) -> list[str]:
        """Everything wrong, for people."""
        failure = [self.failure] if self.failure else []
        return [*failure, *self.verdict.complaints, *self.aftermath.complaints, *self.kv.complaints]

    def line(self) -> str:
        """One line of the table."""
        verdict, pauses = self.verdict, self.pauses
        state = "ok" if self.is_clean else "FAILED"
        if self.is_clean and self.is_over_budget:
            state = f"over {self.pause_budget_s:.0f} s"
        return (
            f"{self.setup.name:<14}{self.scenario.name:<28}{verdict.streams:>7}{verdict.lost:>6}{verdict.repeated:>9}"
            f"{verdict.wrong + verdict.unfinished:>7}{self.aftermath.recomputed:>11}{verdict.near_ties:>6}{self.kv.blocks:>7}"
            f"{pauses.p50_s:>8.2f}{pauses.p99_s:>7.2f}{pauses.max_s:>7.2f}{self.seconds:>8.1f}  {state}"
        )


TITLE = (
    f"{'setup':<14}{'scenario':<28}{'streams':>7}{'lost':>6}{'repeated':>9}{'wrong':>7}{'recomputed':>11}{'ties':>6}{'kv':>7}"
    f"{'pause50':>8}{'p99':>7}{'max':>7}{'seconds':>8}"
)


def summary(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """The JSON line at the end."""
    budgeted = [outcome for outcome in outcomes if outcome.pause_budget_s is not None]
    kills = [outcome for outcome in outcomes if outcome.scenario.is_scheduler_kill]
    return {
        "scenarios": len(outcomes),
        "failed": [f"{outcome.setup.name}:{outcome.scenario.name}" for outcome in outcomes if not outcome.is_clean],
        "over_budget": [f"{outcome.setup.name}:{outcome.scenario.name}" for outcome in outcomes if outcome.is_over_budget],
        "streams": sum(outcome.verdict.streams for outcome in outcomes),
        "tokens": sum(outcome.verdict.tokens for outcome in outcomes),
        "lost": sum(outcome.verdict.lost for outcome in outcomes),
        "repeated": sum(outcome.verdict.repeated for outcome in outcomes),
        "wrong": sum(outcome.verdict.wrong for outcome in outcomes),
        "unfinished": sum(outcome.verdict.unfinished for outcome in outcomes),
        "leaked_blocks": sum(outcome.aftermath.leaked_blocks for outcome in outcomes),
        "orphan_keys": sum(outcome.aftermath.orphan_keys for outcome in outcomes),
        "died": sum(outcome.aftermath.died for outcome in outcomes),
        "recomputed_on_scheduler_kill": sum(outcome.aftermath.recomputed for outcome in kills),
        "recomputed": sum(outcome.aftermath.recomputed for outcome in outcomes),
        "near_ties": sum(outcome.verdict.near_ties for outcome in outcomes),
        "kv_blocks_compared": sum(outcome.kv.blocks for outcome in outcomes),
        "kv_host_blocks_used": sum(outcome.kv.host_blocks for outcome in outcomes),
        "kv_mismatches": sum(outcome.kv.mismatches for outcome in outcomes),
        "kv_difference_max": max((outcome.kv.difference_max for outcome in outcomes), default=0.0),
        "pause_p99_s": round(max((outcome.pauses.p99_s for outcome in budgeted), default=0.0), 3),
    }
