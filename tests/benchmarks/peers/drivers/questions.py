"""The conversation of a driver with the benchmark that started it: standard library only, because it runs in the engine's environment.

One line of JSON in: `prompts`, a list of lists of ids; `output_tokens` of each answer; `arrivals_s`, for each prompt how long after the start it
comes, or null: all at once; `limit_s`, after which what is not answered is given up, or null. One line out: for each prompt when it came and when each
of its tokens came, in seconds of one clock. The first line out says which version it is. What libraries print goes to the log.
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

Timeline = tuple[float, list[float]]
"""When a prompt came, and when each token of its answer did."""


@dataclass
class Question:
    """What is asked, see above."""

    prompts: list[list[int]]
    output_tokens: int
    arrivals_s: list[float] | None
    limit_s: float


class Stepwise(Protocol):
    """An engine that takes requests between its steps. Requests have the numbers that they are given."""

    def add(self, number: int, prompt: list[int], output_tokens: int) -> None: ...

    def step(self) -> Iterable[tuple[int, int]]:
        """Numbers of requests, each with how many tokens came."""

    def is_busy(self) -> bool: ...

    def give_up(self, numbers: list[int]) -> None: ...


Run = Callable[[Question], list[Timeline]]


def stepwise(engine: Stepwise) -> Run:
    """Runs all of a question on it: a prompt is added at the first step after it came."""
    first = 0

    def run(question: Question) -> list[Timeline]:
        nonlocal first
        began = time.perf_counter()
        arrivals_s = question.arrivals_s or [0.0] * len(question.prompts)
        times: list[Timeline] = [(began + arrival_s, []) for arrival_s in arrivals_s]
        added = 0
        while added < len(times) or engine.is_busy():
            now = time.perf_counter()
            if now - began > question.limit_s:
                missing = [number for number in range(added) if len(times[number][1]) < question.output_tokens]
                engine.give_up([first + number for number in missing])
                break
            while added < len(times) and times[added][0] <= now:
                engine.add(first + added, question.prompts[added], question.output_tokens)
                added += 1
            if not engine.is_busy():
                time.sleep(max(0.0, times[added][0] - now))
                continue
            came = list(engine.step())
            now = time.perf_counter()
            for number, tokens in came:
                times[number - first][1].extend([now] * tokens)
        first += len(times)
        return times

    return run


def answer_questions(load: Callable[[], tuple[str, Run]]) -> None:
    """Load the engine, then answer until the input ends. `load` returns its version and what runs questions."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # the log has what was said before an end by force
    version, run = load()
    answers.write(json.dumps({"version": version}) + "\n")
    for line in sys.stdin:
        asked = json.loads(line)
        limit_s = math.inf if asked["limit_s"] is None else asked["limit_s"]
        answers.write(json.dumps(run(Question(**asked | {"limit_s": limit_s}))) + "\n")
