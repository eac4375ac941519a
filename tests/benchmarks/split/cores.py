"""Which cores processes may use: what is started inherits that of whoever starts it."""

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@contextmanager
def on_cores(cores: Collection[int]) -> Iterator[None]:
    """This thread, and the processes and threads that it starts meanwhile, run on these cores; before and after that on others."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclass(frozen=True, slots=True)
class Placement:
    """Who runs where: the worker on some cores, all else (client, gateway, scheduler, Redis) on some."""

    name: str
    worker: frozenset[int]
    others: frozenset[int]


def placements() -> tuple[Placement, ...]:
    """On the first two cores of this process: everything on both, and the worker alone on one of them. Of a machine with one core the former."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    both = frozenset(cores)
    shared = Placement("shared", both, both)
    return (shared,) if len(cores) < 2 else (shared, Placement("pinned", frozenset(cores[:1]), frozenset(cores[1:])))
