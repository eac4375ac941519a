"""How long a first token takes under a load that does not wait for answers: requests come at 70 % of what each contender can serve.

What it can serve is measured as the rate of 32 requests at once, whose lengths are the same. All get the same prompts, in the same pattern of
arrivals (Poisson), stretched to their rates. Then, class by class, the better of ours and the best peer get the same requests at the very
same times: 70 % of what the weaker of the two can serve.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from tests.benchmarks.peers.contender import Run
from tests.benchmarks.peers.contest import FAILURES, Contest, say
from tests.benchmarks.peers.field import Entry
from tests.benchmarks.peers.ratios import CLASSES
from tests.benchmarks.workloads import chosen

SHARE = 0.7
(CAPACITY,) = chosen("w1c32")
NAME = "open"

HEADS = f"{'':<8}{'':<24}{'could serve':>12}{'comes':>10}{'TTFT p50 ms':>13}{'p99':>8}{'TPOT ms':>10}{'output tokens/s':>17}"


@dataclass(frozen=True, slots=True)
class Served:
    """A contender under load: requests per second that it could serve and that came, and what became of them."""

    name: str
    capacity: float
    rate: float
    run: Run

    def row(self) -> str:
        """Of the table."""
        return (
            f"{NAME:<8}{self.name:<24}{self.capacity:>10.2f}/s{self.rate:>8.2f}/s{self.run.ttft_ms.p50:>13.0f}{self.run.ttft_ms.p99:>8.0f}"
            f"{self.run.tpot_ms:>10.1f}{self.run.tokens_per_s:>17.1f}"
        )

    def told(self) -> dict[str, float]:
        """For JSON."""
        figures = {"capacity_per_s": self.capacity, "rate_per_s": self.rate, "tokens_per_s": self.run.tokens_per_s}
        figures |= {"ttft_p50_ms": self.run.ttft_ms.p50, "ttft_p99_ms": self.run.ttft_ms.p99, "tpot_ms": self.run.tpot_ms}
        return {name: round(value, 2) for name, value in figures.items()}


class OpenLoop:
    """Of a contest; `requests` in each run."""

    def __init__(self, contest: Contest, requests: int) -> None:
        self._contest = contest
        self._workload = replace(CAPACITY, name=NAME, requests=requests)

    def measure(self) -> dict[str, Any]:
        """All who take requests as they come and have not lost before; prints the tables. For JSON."""
        if CAPACITY.name not in self._contest.rates:
            self._contest.measure(CAPACITY, 1)
        print(f"{HEADS}   ({self._workload.words} each, at {SHARE:.0%} of what it could serve)", flush=True)
        names = [name for name in self._contest.rates[CAPACITY.name] if self._may_run(name)]
        runs = [self._serve(name, SHARE * self._capacity(name), 0) for name in names]
        served = [run for run in runs if run is not None]
        classes = {}
        for number, (title, (bits_min, bits)) in enumerate(CLASSES.items(), 1):
            ours = _quickest(run for run in served if self._entry(run).is_ours and self._entry(run).bits == bits)
            peer = _quickest(run for run in served if not self._entry(run).is_ours and self._entry(run).bits >= bits_min)
            if ours is not None and peer is not None:
                classes[title] = self._compared(title, number, ours, peer)
        return {"contenders": {run.name: run.told() for run in served}, "classes": classes}

    def _compared(self, title: str, number: int, ours: Served, peer: Served) -> dict[str, Any]:
        """Both at their own rates, and at the lower of these: with new prompts, for those before are in their caches."""
        rate = min(ours.rate, peer.rate)
        print(f"        {title}: {ours.name} and {peer.name}, {rate:.2f}/s each", flush=True)
        same = [run for name in (ours.name, peer.name) if (run := self._serve(name, rate, number)) is not None]
        told: dict[str, Any] = {"ours": ours.name, "peer": peer.name, "ttft_p50_own_rate": _ratio(ours, peer)}
        if len(same) == 2:
            told |= {"ttft_p50_same_rate": _ratio(*same), "same_rate": {run.name: run.told() for run in same}}
        return told

    def _serve(self, name: str, rate: float, number: int) -> Served | None:
        say(f"{name}: {self._workload.requests} requests, {rate:.2f}/s")
        if name not in self._contest.contenders:
            return None
        try:
            with self._contest.turn_of(name) as contender:
                run = contender.serve(self._workload, number, rate)
        except FAILURES as error:
            self._contest.leave_out(name, error)
            return None
        served = Served(name, self._capacity(name), rate, run)
        print(served.row(), flush=True)
        return served

    def _may_run(self, name: str) -> bool:
        is_there = name in self._contest.contenders and self._contest.entries[name].takes_arrivals
        return is_there and name not in self._contest.lost[CAPACITY.name]

    def _capacity(self, name: str) -> float:
        """Requests per second."""
        return self._contest.rates[CAPACITY.name][name].median / CAPACITY.output_tokens

    def _entry(self, run: Served) -> Entry:
        return self._contest.entries[run.name]


def _quickest(runs: Iterable[Served]) -> Served | None:
    """By the time to the first token."""
    return min(runs, key=lambda run: run.run.ttft_ms.p50, default=None)


def _ratio(ours: Served, peer: Served) -> float:
    """Below 1 where ours answers sooner."""
    return round(ours.run.ttft_ms.p50 / peer.run.ttft_ms.p50, 3)
