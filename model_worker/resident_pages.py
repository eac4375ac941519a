"""Pages of host memory, before somebody waits for them."""

import ctypes
from pathlib import Path

from torch import Tensor

PAGE_BYTES = 4096

_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python's mmap has no name for it

_PIECE_BYTES = 32 << 20
"""At a time: whoever maps or frees memory waits for no more."""

SPARE_BYTES = 1 << 30
"""Left to others: who reserved more than there is finds out when it is used, as before."""


def make_resident(memory: Tensor) -> bool:
    """Have the system back `memory` with pages now, instead of each when it is first written, which then waits until it is cleared; a huge one has
    2 MiB. What it holds stays, whoever reads and writes it meanwhile. False where the system cannot do that, or has not enough."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes, madvise.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    first = -(-memory.data_ptr() // PAGE_BYTES) * PAGE_BYTES
    end = (memory.data_ptr() + memory.nbytes) // PAGE_BYTES * PAGE_BYTES
    pieces = ((at, min(_PIECE_BYTES, end - at)) for at in range(first, end, _PIECE_BYTES))
    return all(available_bytes() > SPARE_BYTES and madvise(at, size, _MADV_POPULATE_WRITE) == 0 for at, size in pieces)


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """What the system can give without swapping, and a container's limit allows (what it caches counts as used); 0 where the system says nothing."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return 0
    free = next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), 0)
    return min(free, *(_left(cgroup / limit, cgroup / used) for limit, used in _CGROUP_FILES))


_CGROUP_FILES = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
"""Limit and use, of versions 2 and 1."""


def _left(limit: Path, used: Path) -> float:
    try:
        return int(limit.read_text()) - int(used.read_text())
    except (OSError, ValueError):  # another version, or "max"
        return float("inf")
