"""Engines in Python, each driven in a process of its own, in its own environment, without a server in front."""

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tessera.values.model import ModelInfo
from tests.benchmarks.peers.contender import Contender, Run, process, run_of
from tests.benchmarks.peers.install import last_line
from tests.benchmarks.workloads import Workload

DRIVERS = Path(__file__).with_name("drivers")
WARM_TOKENS = 2


class Driven:
    """An engine whose driver answers questions (see `drivers/questions.py`)."""

    def __init__(self, driver: subprocess.Popen[str], log: Path, model: ModelInfo) -> None:
        self._driver = driver
        self._log = log
        self._model = model
        self.version = str(self._answer()["version"])

    def run(self, workload: Workload, seed: int) -> Run:
        """See `Contender`."""
        if workload.is_warm:
            self._ask([workload.warm_prompt(self._model, seed)], WARM_TOKENS)
        return run_of(self._ask(workload.prompts(self._model, seed), workload.output_tokens), workload)

    def _ask(self, of: list[list[int]], output_tokens: int) -> list[tuple[float, list[float]]]:
        assert self._driver.stdin is not None, "the driver was started with pipes"
        self._driver.stdin.write(json.dumps({"prompts": of, "output_tokens": output_tokens}) + "\n")
        self._driver.stdin.flush()
        return [(submitted, came) for submitted, came in self._answer()]

    def _answer(self):  # type: ignore[no-untyped-def]
        assert self._driver.stdout is not None, "the driver was started with pipes"
        line = self._driver.stdout.readline()
        if not line:
            raise RuntimeError(f"it ended: {last_line(self._log)} (log: {self._log})")
        return json.loads(line)


@contextmanager
def driven(python: Path, driver: str, arguments: Sequence[object], log: Path, model: ModelInfo) -> Iterator[Contender]:
    """One that is loaded. Raises RuntimeError where it does not load."""
    command = [python, DRIVERS / driver, *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with process(command, log, {"VLLM_CACHE_ROOT": str(log.parent.with_name("vllm-cache"))}, **pipes) as started:
        yield Driven(started, log, model)
