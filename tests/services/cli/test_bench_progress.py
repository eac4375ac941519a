"""The bar of a benchmark: on terminals, and only there."""

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from services.bench.load import Load
from services.bench.outcome import Outcome
from services.bench.workload import PlannedRequest
from services.cli.bench_progress import progress


async def ask(request: PlannedRequest, _arrival_s: float | None) -> Outcome:
    return Outcome(request.index, 0.0, 0.0, "OK")


async def shown_load(count: int | None, duration_s: float | None) -> None:
    load = Load(ask, 2, duration_s)
    async with progress(load, "2 at once", count):
        await load.run(iter([PlannedRequest(index, 1, 1) for index in range(4)]), asyncio.Event())


@pytest.mark.parametrize(("count", "duration_s"), [(4, None), (None, 3.0)])
def test_a_terminal_gets_a_bar(
    run_async: Callable[[Coroutine[Any, Any, Any]], Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    count: int | None,
    duration_s: float | None,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    run_async(shown_load(count, duration_s))
    out, err = capsys.readouterr()
    assert out == "" and "2 at once" in err
    assert ("100%" in err) == (count is not None), "four requests take no seconds"


def test_nobody_else_gets_anything(
    run_async: Callable[[Coroutine[Any, Any, Any]], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run_async(shown_load(4, None))
    assert capsys.readouterr() == ("", "")
