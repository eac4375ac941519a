"""Where the time of a step goes in a process: functions that are timed from outside, and what they took between two steps."""

import functools
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

EVENT = "phases"


class Phases:
    """Nanoseconds by phase since the last `tell`. Functions that call each other are each told without the other."""

    def __init__(self) -> None:
        self._spent_ns: dict[str, int] = defaultdict(int)
        self._inner_ns = [0]  # of what the running functions have called, the innermost last

    def time(self, owner: Any, name: str, phase: str) -> None:
        """Count the time of `owner.name`, a function or a method, under this phase."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began_ns = time.perf_counter_ns()
            self._inner_ns.append(0)
            try:
                return function(*args, **kwargs)
            finally:
                took_ns = time.perf_counter_ns() - began_ns
                self._spent_ns[phase] += took_ns - self._inner_ns.pop()
                self._inner_ns[-1] += took_ns

        setattr(owner, name, timed)

    def add(self, phase: str, ns: int) -> None:
        """Count what was timed otherwise."""
        self._spent_ns[phase] += ns

    def tell(self, **also: float) -> None:
        """A step has ended: say in a line on standard error what was counted since the last."""
        told = {phase: ns / 1000 for phase, ns in self._spent_ns.items()}
        self._spent_ns.clear()
        print(json.dumps({"event": EVENT, **also, "us": told}), file=sys.stderr, flush=True)


def step_phases(events: Iterable[dict[str, Any]], is_wanted: Callable[[dict[str, Any]], bool]) -> dict[str, float]:
    """Mean microseconds per step by phase, of the steps that are wanted, and how many `steps` they are."""
    steps = [event for event in events if event["event"] == EVENT and is_wanted(event)]
    names = dict.fromkeys(name for step in steps for name in step["us"])
    means = {name: statistics.fmean(step["us"].get(name, 0.0) for step in steps) for name in names}
    return {"steps": len(steps), **means}
