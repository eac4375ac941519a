"""How a driver runs a question on an engine that takes requests between its steps."""

import importlib.util
import math
import time
from pathlib import Path
from types import ModuleType

import pytest


def _questions() -> ModuleType:
    spec = importlib.util.spec_from_file_location("questions", Path(__file__).with_name("drivers") / "questions.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


questions = _questions()


class Clock:
    """Time that only sleeping and computing take."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0, "nobody waits for what is there"
        self.now += seconds


class OneASecond:
    """An engine that makes one token of everybody in a second."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._left: dict[int, int] = {}
        self.given_up: list[int] = []

    def add(self, number: int, prompt: list[int], output_tokens: int) -> None:
        assert number not in self._left
        self._left[number] = output_tokens

    def step(self) -> list[tuple[int, int]]:
        self._clock.now += 1.0
        came = [(number, 1) for number in self._left]
        self._left = {number: left - 1 for number, left in self._left.items() if left > 1}
        return came

    def is_busy(self) -> bool:
        return bool(self._left)

    def give_up(self, numbers: list[int]) -> None:
        self.given_up += numbers
        self._left.clear()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock.perf_counter)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    return clock


def test_prompts_are_added_at_the_first_step_after_they_came(clock: Clock) -> None:
    run = questions.stepwise(OneASecond(clock))
    told = run(questions.Question([[1], [2], [3]], 2, [0.0, 0.5, 7.0], math.inf))
    assert told == [(100.0, [101.0, 102.0]), (100.5, [102.0, 103.0]), (107.0, [108.0, 109.0])]


def test_without_arrivals_all_come_at_once_and_questions_follow_each_other(clock: Clock) -> None:
    run = questions.stepwise(OneASecond(clock))
    assert run(questions.Question([[1], [2]], 1, None, math.inf)) == [(100.0, [101.0])] * 2
    assert run(questions.Question([[1]], 1, None, math.inf)) == [(101.0, [102.0])]


def test_after_its_limit_what_is_not_answered_is_given_up(clock: Clock) -> None:
    engine = OneASecond(clock)
    run = questions.stepwise(engine)
    told = run(questions.Question([[1], [2]], 5, None, 2.5))
    assert told == [(100.0, [101.0, 102.0, 103.0])] * 2 and engine.given_up == [0, 1]
    assert run(questions.Question([[1]], 1, None, 2.5)) == [(103.0, [104.0])], "it runs on"
