"""Engines in Python, each driven in a process of its own, in its own environment, without a server in front."""

import json
import math
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tessera.values.model import ModelInfo
from tests.benchmarks.peers.asked import Asked
from tests.benchmarks.peers.contender import Contender, Timeline, process
from tests.benchmarks.peers.install import last_line

DRIVERS = Path(__file__).with_name("drivers")


class Driven(Asked):
    """An engine whose driver answers questions (see `drivers/questions.py`)."""

    def __init__(self, driver: subprocess.Popen[str], log: Path, model: ModelInfo) -> None:
        self._driver = driver
        self._log = log
        super().__init__(model)
        self.version = str(self._answer()["version"])

    def _ask(
        self, prompts: list[list[int]], output_tokens: int, arrivals_s: list[float] | None = None, limit_s: float = math.inf
    ) -> list[Timeline]:
        assert self._driver.stdin is not None, "the driver was started with pipes"
        limit = None if limit_s == math.inf else limit_s
        question = {"prompts": prompts, "output_tokens": output_tokens, "arrivals_s": arrivals_s, "limit_s": limit}
        self._driver.stdin.write(json.dumps(question) + "\n")
        self._driver.stdin.flush()
        return [(submitted, came) for submitted, came in self._answer()]

    def _answer(self):  # type: ignore[no-untyped-def]
        assert self._driver.stdout is not None, "the driver was started with pipes"
        line = self._driver.stdout.readline()
        if not line:
            raise RuntimeError(f"it ended: {last_line(self._log)} (log: {self._log})")
        return json.loads(line)


@contextmanager
def driven(
    python: Path,
    driver: str,
    arguments: Sequence[object],
    log: Path,
    model: ModelInfo,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Contender]:
    """One that is loaded, with `environment` beside that of this process. Raises RuntimeError where it does not load."""
    command = [python, DRIVERS / driver, *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with process(command, log, environment, **pipes) as started:
        yield Driven(started, log, model)
