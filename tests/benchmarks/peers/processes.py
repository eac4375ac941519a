"""Processes that are stopped while it is not their turn."""

import contextlib
from collections.abc import Iterable

import psutil


def children() -> set[psutil.Process]:
    """Those that this process has started and that run."""
    return set(psutil.Process().children())


def stop(processes: Iterable[psutil.Process]) -> None:
    """Them and all below them, parents first: nobody is started meanwhile."""
    for process in processes:
        _to_all(process, "suspend")


def resume(processes: Iterable[psutil.Process]) -> None:
    """Undo `stop`."""
    for process in processes:
        _to_all(process, "resume")


def _to_all(process: psutil.Process, what: str) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        getattr(process, what)()
        for child in process.children():
            _to_all(child, what)
