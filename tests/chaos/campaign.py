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
from tests.chaos.verdict import check_stopped, check_undisturbed, judge
from tests.system.near_ties import Judge

WARM_TOKENS_PER_STREAM = 8
WARM_TIMEOUT_S = 90.0
GO_ON_TOKENS_PER_STREAM = 3
GO_ON_TIMEOUT_S = 60.0
FINISH_TIMEOUT_S = 120.0

CLUSTERS_MAX = 8
"""Where so many went wrong, more would only say the same."""


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
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told, and the next scenario gets a new cluster
            text = f"{type(error).__name__}: {error}"
            outcome = Outcome(self._setup, scenario, time.monotonic() - began, failure=text)
        if not outcome.is_clean:
            self._is_clean = False
            self._say(f"the cluster's logs stay in {self._folder}")
            self._end()
        return outcome

    def _start(self) -> None:
        assert self._clusters < CLUSTERS_MAX, f"{CLUSTERS_MAX} clusters went wrong, no more is started"
        self._clusters += 1
        self._say(f"{self._setup.name}: starting a cluster")
        cluster = self._running.enter_context(Cluster(self._folder / str(self._clusters), self._setup))
        self._load = self._running.enter_context(Load(cluster.client_addresses))
        self._inspector = Inspector(cluster)
        if not self._expected:
            self._run_undisturbed()
        self._cluster = cluster

    def _run_undisturbed(self) -> None:
        """Every ask once, and those that get a stop string out of their own answer once more."""
        began, setup = time.monotonic(), self._setup
        plain = self._load.run(setup.asks, setup.concurrency, FINISH_TIMEOUT_S)
        check_undisturbed(plain)
        asks = with_stop_strings(setup.asks, [log.text for log in plain])
        again = [index for index, ask in enumerate(asks) if ask.stop]
        stopped = self._load.run([asks[index] for index in again], setup.concurrency, FINISH_TIMEOUT_S)
        check_undisturbed(stopped)
        expected = list(plain)
        for index, log in zip(again, stopped, strict=True):
            if setup.is_deterministic:
                check_stopped(asks[index], plain[index], log)
            expected[index] = log
        ordinary = Pauses.ordinary(plain)
        self._asks, self._expected = asks, expected
        self._say(
            f"{setup.name}: undisturbed, {len(asks)} streams, {sum(isinstance(log.stop, str) for log in stopped)} of which end at a stop "
            f"string, in {time.monotonic() - began:.1f} s; ordinary longest gap p50 {ordinary.p50_s:.2f} s, p99 {ordinary.p99_s:.2f} s"
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
