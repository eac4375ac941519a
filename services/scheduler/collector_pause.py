"""No garbage collection for a while: a takeover makes a hundred thousand lists and arrays and no cycles, and looking for some takes a fifth
of its time."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Within the block nothing is collected; after it, things are as before."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
