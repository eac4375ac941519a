"""A bar on standard error while a benchmark runs, where that is a terminal."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import click

from services.bench.load import Load

TICK_S = 0.25

Bar = Any
"""What `click.progressbar` gives: click has no public name for it."""


@asynccontextmanager
async def progress(load: Load, label: str, count: int | None) -> AsyncIterator[None]:
    """Show how far `load` is: of `count` requests, or without a count of its seconds."""
    if not sys.stderr.isatty():
        yield
        return
    length = count if count is not None else max(1, round(load.duration_s or 0))
    shown: Bar = click.progressbar(
        length=length, label=label, file=sys.stderr, item_show_func=lambda _item: f"{load.num_running} running"
    )
    with shown as bar:
        ticking = asyncio.create_task(_tick(load, bar, count))
        try:
            yield
        finally:
            ticking.cancel()
            with suppress(asyncio.CancelledError):
                await ticking
            _show(load, bar, count)


async def _tick(load: Load, bar: Bar, count: int | None) -> None:
    while True:
        await asyncio.sleep(TICK_S)
        _show(load, bar, count)


def _show(load: Load, bar: Bar, count: int | None) -> None:
    done = len(load.outcomes) if count is not None else int(time.monotonic() - load.began_s)
    bar.update(min(done, bar.length or 0) - bar.pos)
