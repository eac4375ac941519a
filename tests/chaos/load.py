"""Client streams against a cluster, in a process of their own: hundreds of them must not slow the one that injects the faults."""

import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from tests.chaos.asks import Ask
from tests.chaos.links import ROOT
from tests.chaos.stream_log import Progress, StreamLog

ANSWER_TIMEOUT_S = 30.0
POLL_S = 0.1


class LoadStalled(AssertionError):
    """The streams did not come to the point that a scenario waits for."""


@dataclass
class Load:
    """Handle of the load process. `addresses` are the gateways', each client knows them all; half of the streams begin at each."""

    addresses: tuple[str, ...]

    def __post_init__(self) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        command = [sys.executable, "-m", "tests.chaos.load_process", str(theirs.fileno()), *self.addresses]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),))
        theirs.close()

    def run(self, asks: Sequence[Ask], concurrency: int, timeout_s: float) -> list[StreamLog]:
        """Every ask once, at most `concurrency` at a time; logs in the order of the asks."""
        self.begin(asks, concurrency, repeat=False)
        return sorted(self.finish(timeout_s), key=lambda log: log.ask)

    def begin(self, asks: Sequence[Ask], concurrency: int, repeat: bool = True) -> None:
        """Keep `concurrency` streams running, over the asks in turn and again from the first one, until `finish`."""
        self._ask(("begin", list(asks), concurrency, repeat))

    def progress(self) -> Progress:
        """How far the streams are."""
        progress = self._ask(("progress",))
        assert isinstance(progress, Progress)
        return progress

    def wait(self, what: str, condition: Callable[[Progress], bool], timeout_s: float) -> None:
        """Poll until `condition` holds."""
        deadline = time.monotonic() + timeout_s
        while not condition(progress := self.progress()):
            if time.monotonic() > deadline:
                raise LoadStalled(f"{what}: not after {timeout_s:.0f} s, {progress}")
            time.sleep(POLL_S)

    def finish(self, timeout_s: float) -> list[StreamLog]:
        """Begin no more, let every stream come to its end, and take the logs. What has no end after `timeout_s` is given up: its error
        says so."""
        logs = self._ask(("finish", timeout_s), timeout_s + ANSWER_TIMEOUT_S)
        assert isinstance(logs, list)
        return logs

    def tokenize(self, ask: Ask) -> list[int]:
        """The prompt of `ask` as the gateway reads it."""
        ids = self._ask(("tokenize", ask.prompt))
        assert isinstance(ids, list)
        return ids

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _ask(self, command: tuple[Any, ...], timeout_s: float = ANSWER_TIMEOUT_S) -> object:
        self._pipe.send(command)
        if not self._pipe.poll(timeout_s):
            raise LoadStalled(f"the load process does not answer {command[0]}")
        answer = self._pipe.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer
