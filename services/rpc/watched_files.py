"""Files that others replace while a process runs, as certificates and tokens are."""

from collections.abc import Sequence
from pathlib import Path

Stamp = tuple[tuple[int, int, int], ...]
"""What changes when one of the files does: inode, time of change and size of each."""


def stamp_of(files: Sequence[Path]) -> Stamp:
    """The files as they are now; one that is not there is all zeros. Costs a few microseconds."""
    return tuple(_stamp_of(file) for file in files)


def _stamp_of(file: Path) -> tuple[int, int, int]:
    try:
        found = file.stat()
    except OSError:
        return 0, 0, 0
    return found.st_ino, found.st_mtime_ns, found.st_size
