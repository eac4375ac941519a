"""Plays scenarios on one setup: a cluster is shared until one of them goes wrong, and asked the same things undisturbed first."""

import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.chaos.aftermath import Inspector
from tests.chaos.asks import Ask, with_stop_strings
from tests.chaos.cluster import Cluster
from tests.chaos.kv_check import FreshPrefill, KVVerdict, check_kv
from tests.chaos.load import Load
from tests.chaos.outcome import Outcome, Pauses
from tests.chaos.scenarios import Scenario
from tests.chaos.setups import Setup
from tests.chaos.stage import Stage
from tests.chaos.stream_log import StreamLog
from tests.chaos.verdict import check_undisturbed, judge
from tests.system.near_ties import Judge

WARM_TOKENS_PER_STREAM = 8
WARM_TIMEOUT_S = 90.0
GO_ON_TOKENS_PER_STREAM = 3
GO_ON_TIMEOUT_S = 60.0
FINISH_TIMEOUT_S = 120.0


class Campaign:
    """One setup. Use it as a context manager: it ends its processes, and deletes its folder unless something went wrong."""

    def __init__(self, setup: Setup, say: Callable[[str], None], seed: int = 1, random_kills: int = 100) -> None:
        self._setup = setup
        self._say = say
        self._seed = seed
        self._random_kills = random_kills
        self._folder = Path(tempfile.mkdtemp(prefix=f"tessera-chaos-{setup.name}-"))
        self._running = ExitStack()
        self._cluster: Cluster | None = None
        self._asks: list[Ask] = []
        self._expected: list[StreamLog] = []
        self._judge: Judge | None = None
        self._prefill: FreshPrefill | None = None
        self._is_clean = True
        self._clusters = 0

    def play(self, scenario: Scenario) -> Outcome:
        """One scenario under load, and everything that is checked after it."""
        began = time.monotonic()
        try:
            if self._cluster is None:
                self._start()
            outcome = self._play(scenario, began)
        except (AssertionError, OSError, RuntimeError) as error:
            outcome = Outcome(self._setup, scenario, time.monotonic() - began, failure=f"{type(error).__name__}: {error}")
        if not outcome.is_clean:
            self._is_clean = False
            self._say(f"the cluster's logs stay in {self._folder}")
            self._end()
        return outcome

    def _start(self) -> None:
        self._clusters += 1
        self._say(f"{self._setup.name}: starting a cluster")
        self._cluster = self._running.enter_context(Cluster(self._folder / str(self._clusters), self._setup))
        self._load = self._running.enter_context(Load(self._cluster.client_addresses))
        self._inspector = Inspector(self._cluster)
        if not self._expected:
            self._run_undisturbed()

    def _run_undisturbed(self) -> None:
        """Every ask once, and those that get a stop string out of their own answer once more."""
        began = time.monotonic()
        self._expected = self._load.run(self._setup.asks, self._setup.concurrency, FINISH_TIMEOUT_S)
        check_undisturbed(self._expected)
        ordinary = Pauses.ordinary(self._expected)
        self._asks = with_stop_strings(self._setup.asks, [log.text for log in self._expected])
        again = [index for index, ask in enumerate(self._asks) if ask.stop]
        stopped = self._load.run([self._asks[index] for index in again], self._setup.concurrency, FINISH_TIMEOUT_S)
        check_undisturbed(stopped)
        for index, log in zip(again, stopped, strict=True):
            self._expected[index] = log
        self._say(
            f"{self._setup.name}: undisturbed, {len(self._asks)} streams, {sum(isinstance(log.stop, str) for log in stopped)} of which end "
            f"at a stop string, in {time.monotonic() - began:.1f} s; ordinary longest gap p50 {ordinary.p50_s:.2f} s, p99 "
            f"{ordinary.p99_s:.2f} s"
        )

    def _play(self, scenario: Scenario, began: float) -> Outcome:
        assert self._cluster is not None
        setup, load = self._setup, self._load
        stage = Stage(self._cluster, load, lambda text: self._say(f"{setup.name} {scenario.name}: {text}"), self._random_kills)
        self._warm_up()
        scenario.act(stage, random.Random(f"{self._seed} {scenario.name}"))
        self._cluster.wait_ready()
        self._go_on()
        logs = load.finish(FINISH_TIMEOUT_S)
        verdict = judge(self._asks, self._expected, logs, None if setup.is_deterministic else self._rounding)
        aftermath = self._inspector.inspect()
        kv = check_kv(self._cluster, self._fresh_prefill()) if aftermath.is_clean else KVVerdict()
        assert stage.first_fault_s is not None, "a scenario does something"
        pauses = Pauses.of(logs, stage.first_fault_s)
        return Outcome(setup, scenario, time.monotonic() - began, pauses, verdict, aftermath, kv)

    def _warm_up(self) -> None:
        """Streams of all kinds are under way."""
        lanes = self._setup.concurrency
        self._load.begin(self._asks, lanes)
        self._load.wait(
            "streams under way",
            lambda now: now.started >= lanes and now.tokens >= lanes * WARM_TOKENS_PER_STREAM,
            WARM_TIMEOUT_S,
        )

    def _go_on(self) -> None:
        """Tokens come again after the last fault."""
        enough = self._load.progress().tokens + self._setup.concurrency * GO_ON_TOKENS_PER_STREAM
        self._load.wait("streams going on", lambda now: now.tokens >= enough, GO_ON_TIMEOUT_S)

    def _rounding(self, ask: Ask, expected: Sequence[int], came: Sequence[int]) -> str:
        if self._judge is None:
            self._judge = Judge(self._setup.model)
        try:
            self._judge.assert_same(self._load.tokenize(ask), expected, came, ask.temperature, ask.seed)
        except AssertionError as error:
            return str(error)
        return ""

    def _fresh_prefill(self) -> FreshPrefill:
        if self._prefill is None:
            self._prefill = FreshPrefill(self._setup)
        return self._prefill

    def _end(self) -> None:
        self._cluster = None
        self._running.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()
        if self._is_clean and error is None:
            shutil.rmtree(self._folder, ignore_errors=True)
