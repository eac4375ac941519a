"""Contenders that are loaded side by side and take turns in a workload; and what they reached."""

import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil

from tessera.client import TesseraError
from tests.benchmarks.peers.contender import Contender, Run
from tests.benchmarks.peers.field import Entry
from tests.benchmarks.peers.install import InstallFailed
from tests.benchmarks.peers.processes import children, resume, stop
from tests.benchmarks.peers.ratios import LOST_BELOW, Rate, best_of, has_lost, ratios
from tests.benchmarks.workloads import Workload

WARM_UP = Workload("warm_up", 8, 128, 8)

FAILURES = (OSError, RuntimeError, subprocess.SubprocessError, TesseraError)
"""What an engine that fails is known by: its driver, its server, `tessera bench`, the product's client."""

SPARE_BYTES = 6 << 30
"""What is to be free before one more is started: it takes up to 4 GiB, and those who run grow with their contexts."""

HEADS = f"{'':<8}{'requests':<36}{'':<24}{'output tokens/s':>26}{'TTFT ms':>10}{'TPOT ms':>10}"


def say(text: str) -> None:
    """To whoever waits: standard output is for the results."""
    print(text, file=sys.stderr, flush=True)


def _require_memory() -> None:
    """Raises RuntimeError where there is none for one more: the system would end one of them later, and without a word."""
    free = psutil.virtual_memory().available
    if free < SPARE_BYTES:
        raise RuntimeError(
            f"{free / (1 << 30):.1f} GiB of memory are left, {SPARE_BYTES >> 30} are wanted: compare fewer at a time by --only"
        )


@dataclass
class Contest:
    """Those who are compared, by name, and their rates by workload and name; `failed` says why somebody is left out, `lost` who need not run
    all rounds of a workload."""

    entries: dict[str, Entry] = field(default_factory=dict)
    contenders: dict[str, Contender] = field(default_factory=dict)
    processes: dict[str, set[psutil.Process]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    rates: dict[str, dict[str, Rate]] = field(default_factory=dict)
    lost: dict[str, set[str]] = field(default_factory=dict)

    def enter(self, entry: Entry, stack: ExitStack) -> None:
        """Install, start and warm one up; `stack` ends it."""
        say(f"{entry.name} ...")
        began_s = time.monotonic()
        before = children()
        try:
            _require_memory()
            contender = stack.enter_context(entry.prepare()())
            contender.run(WARM_UP, 0)
        except (InstallFailed, *FAILURES) as error:
            self.leave_out(entry.name, error)
            return
        processes = self.processes[entry.name] = children() - before
        stop(processes)
        stack.callback(resume, processes)  # before it is ended
        self.entries[entry.name], self.contenders[entry.name] = entry, contender
        say(f"  ready after {time.monotonic() - began_s:.0f} s")

    @contextmanager
    def turn_of(self, name: str) -> Iterator[Contender]:
        """It alone may compute meanwhile. The others are stopped: even what they do now and then while idle costs who computes with threads that
        wait for each other a fifth of its speed."""
        resume(self.processes[name])
        try:
            self.contenders[name].wake()
            yield self.contenders[name]
        finally:
            stop(self.processes[name])

    def measure(self, workload: Workload, rounds: int) -> None:
        """All of them in turn, `rounds` times; prints a row for each. In the first round a peer is ended as soon as it has lost to one before
        it, so those who were fast in the last workload come first; who has lost has no second round."""
        runs: dict[str, list[Run]] = {name: [] for name in self._fast_first()}
        lost: set[str] = set()
        for number in range(rounds):
            names = [name for name in runs if name in self.contenders and name not in lost]
            first = number * len(names) // rounds
            for name in names[first:] + names[:first]:
                limit_s = math.inf if number else self._limit_s(name, workload, runs)
                try:
                    with self.turn_of(name) as contender:
                        runs[name].append(contender.run(workload, number, limit_s))
                except FAILURES as error:
                    self.leave_out(name, error)
            if number == 0:
                lost = self._losers(runs)
        of_all = {name: self._rate(name, runs[name]) for name in runs if name in self.contenders}
        self.rates[workload.name], self.lost[workload.name] = of_all, lost
        for name, rate in sorted(of_all.items(), key=lambda item: -item[1].median):
            print(_row(workload, rate, runs[name], name in lost), flush=True)

    def ratios(self) -> dict[str, dict[str, Any]]:
        """By workload, see `ratios.ratios`."""
        return {workload: ratios(*self._sides(rates)) for workload, rates in self.rates.items()}

    def told(self) -> dict[str, dict[str, dict[str, float]]]:
        """Output tokens per second for JSON, by contender and workload."""
        told: dict[str, dict[str, dict[str, float]]] = {}
        for workload, rates in self.rates.items():
            for name, rate in rates.items():
                figures = {"median": rate.median, "lowest": min(rate.rounds), "highest": max(rate.rounds)}
                rounded = {key: round(figure, 1) for key, figure in figures.items()}
                told.setdefault(name, {})[workload] = rounded | {"rounds": len(rate.rounds)}
        return told

    def leave_out(self, name: str, error: Exception) -> None:
        """It runs no more."""
        self.contenders.pop(name, None)
        self.failed[name] = str(error)
        say(f"  {name} is left out: {error}")

    def _fast_first(self) -> list[str]:
        last = next(reversed(self.rates.values()), {})
        return sorted(self.contenders, key=lambda name: -last[name].median if name in last else 0.0)

    def _limit_s(self, name: str, workload: Workload, runs: dict[str, list[Run]]) -> float:
        """After which a peer has lost to the best of its class so far."""
        if self.entries[name].is_ours:
            return math.inf
        best = best_of(self._peers(runs), self.entries[name].bits)
        return math.inf if best is None else workload.tokens_out / (LOST_BELOW * best.median)

    def _losers(self, runs: dict[str, list[Run]]) -> set[str]:
        """After the first round."""
        peers = self._peers(runs)
        return {peer.name for peer in peers if has_lost(peer, peers) or not runs[peer.name][0].is_whole}

    def _peers(self, runs: dict[str, list[Run]]) -> list[Rate]:
        there = [name for name in runs if runs[name] and not self.entries[name].is_ours]
        return [self._rate(name, runs[name]) for name in there]

    def _sides(self, rates: dict[str, Rate]) -> tuple[list[Rate], list[Rate]]:
        """Ours, and the others."""
        sides: tuple[list[Rate], list[Rate]] = ([], [])
        for name, rate in rates.items():
            sides[not self.entries[name].is_ours].append(rate)
        return sides

    def _rate(self, name: str, runs: list[Run]) -> Rate:
        return Rate(name, self.entries[name].bits, tuple(run.tokens_per_s for run in runs))


def _row(workload: Workload, rate: Rate, runs: list[Run], is_lost: bool) -> str:
    spread = f"{rate.median:.1f} ({min(rate.rounds):.1f} to {max(rate.rounds):.1f})"
    if is_lost:
        spread = f"{rate.median:.1f} (one round)"
    ttft_ms, tpot_ms = statistics.median(run.ttft_ms.mean for run in runs), statistics.median(run.tpot_ms for run in runs)
    row = f"{workload.name:<8}{workload.words:<36}{rate.name:<24}{spread:>26}{ttft_ms:>10.0f}{tpot_ms:>10.1f}"
    return row if runs[0].is_whole else f"{row}   stopped after {runs[0].seconds:.0f} s, having lost"
