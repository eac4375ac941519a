"""Who runs when in a comparison, who need not run again, and what requests that come by themselves are compared by."""

import math
import subprocess
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import psutil
import pytest

from services.bench.figures import spread_of
from tests.benchmarks.peers.contender import Run
from tests.benchmarks.peers.contest import Contest
from tests.benchmarks.peers.field import Entry
from tests.benchmarks.peers.open_loop import OpenLoop
from tests.benchmarks.workloads import Workload, chosen

SHORT = Workload("short", 4, 8, 25)
TTFT_MS = 40.0


@dataclass
class Fake:
    """Makes so many tokens a second. Notes the rounds that it ran with their limits, and the rates that it served."""

    name: str
    bits: int
    tokens_per_s: float
    is_ours: bool = False
    takes_arrivals: bool = True
    order: list[str] = field(default_factory=list)
    limits_s: list[float] = field(default_factory=list)
    served: list[float] = field(default_factory=list)

    def wake(self) -> None:
        pass

    def run(self, workload: Workload, number: int, limit_s: float = math.inf) -> Run:
        if workload.name != "warm_up":
            self.order.append(self.name)
            self.limits_s.append(limit_s)
        seconds = workload.tokens_out / self.tokens_per_s
        if seconds > limit_s:
            return Run(limit_s, int(limit_s * self.tokens_per_s), _ttft(), 1.0, is_whole=False)
        return Run(seconds, workload.tokens_out, _ttft(), 1.0)

    def serve(self, workload: Workload, number: int, rate: float) -> Run:
        self.served.append(rate)
        ttft_ms = TTFT_MS * rate / self.tokens_per_s
        return Run(workload.requests / rate, workload.tokens_out, _ttft(ttft_ms), 1.0)


def _ttft(ms: float = 1.0):
    spread = spread_of([ms])
    assert spread is not None
    return spread


def contest_of(*fakes: Fake) -> Contest:
    contest, order = Contest(), []
    with ExitStack() as stack:
        for fake in fakes:
            fake.order = order
            opened = contextmanager(lambda fake=fake: iter([fake]))
            entry = Entry(fake.name, fake.bits, lambda opened=opened: opened, fake.is_ours, fake.takes_arrivals)
            contest.enter(entry, stack)
    return contest


def test_a_peer_that_has_lost_is_stopped_and_has_no_second_round(capsys: pytest.CaptureFixture[str]) -> None:
    ours, best = Fake("ours", 16, 10.0, is_ours=True), Fake("best", 16, 100.0)
    near, slow, exact = Fake("near", 16, 51.0), Fake("slow", 16, 10.0), Fake("exact", 32, 10.0)
    contest = contest_of(ours, best, near, slow, exact)
    contest.measure(SHORT, 3)
    assert (len(ours.limits_s), len(best.limits_s), len(near.limits_s), len(slow.limits_s)) == (3, 3, 3, 1)
    assert slow.limits_s == [2.0], "twice as long as the best took"
    assert len(exact.limits_s) == 3 and exact.limits_s[0] == math.inf, "the only one of its class"
    assert ours.limits_s == [math.inf] * 3, "ours is never stopped"
    rows = {row.split(")")[1].split()[0]: row for row in capsys.readouterr().out.splitlines()}
    assert "(one round)" in rows["slow"] and "stopped after 2 s" in rows["slow"] and "one round" not in rows["near"]
    assert contest.told()["slow"]["short"] == {"median": 10.0, "lowest": 10.0, "highest": 10.0, "rounds": 1}
    assert contest.ratios()["short"]["16 bits or more"]["peer"] == "best"


def test_who_was_fast_in_the_last_workload_comes_first() -> None:
    contest = contest_of(Fake("a", 32, 60.0), fastest := Fake("b", 32, 100.0), Fake("c", 32, 80.0))
    contest.measure(SHORT, 1)
    fastest.order.clear()
    contest.measure(SHORT, 2)
    assert fastest.order[:3] == ["b", "c", "a"] and fastest.order[3] == "c", "and in another order every round"


def test_the_open_loop_has_each_at_its_own_rate_and_two_at_the_same() -> None:
    ours, weak = Fake("ours", 32, 1280.0, is_ours=True), Fake("weak", 32, 640.0)
    batch = Fake("batch", 32, 1280.0, takes_arrivals=False)
    contest = contest_of(ours, weak, batch)
    told = OpenLoop(contest, 16).measure()
    assert contest.rates.keys() == {chosen("w1c32")[0].name}, "what they can serve is measured first"
    assert (
        ours.served == [pytest.approx(7.0), pytest.approx(3.5)] and weak.served == [pytest.approx(3.5)] * 2 and not batch.served
    )
    of_class = told["classes"]["f32"]
    assert (of_class["ours"], of_class["peer"]) == ("ours", "weak")
    assert (of_class["ttft_p50_own_rate"], of_class["ttft_p50_same_rate"]) == (1.0, 0.5)
    assert told["contenders"]["ours"]["rate_per_s"] == 7.0


@dataclass
class Failing(Fake):
    """Fails in its second round."""

    def run(self, workload: Workload, number: int, limit_s: float = math.inf) -> Run:
        if number:
            raise subprocess.CalledProcessError(1, "tessera bench")
        return super().run(workload, number, limit_s)


def test_who_fails_is_left_out_and_the_rest_goes_on() -> None:
    contest = contest_of(Failing("failing", 32, 100.0), Fake("other", 32, 90.0))
    contest.measure(SHORT, 2)
    assert list(contest.rates["short"]) == ["other"] and "exit status 1" in contest.failed["failing"]


def test_nobody_is_started_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=5 << 30))
    contest = contest_of(Fake("peer", 16, 100.0))
    assert not contest.contenders
    assert contest.failed["peer"] == "5.0 GiB of memory are left, 6 are wanted: compare fewer at a time by --only"
