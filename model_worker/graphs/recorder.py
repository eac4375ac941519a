"""The port to whatever records what a device does, and does it again."""

from collections.abc import Callable
from typing import Protocol

Replay = Callable[[], None]
"""Does again what was recorded, with what its tensors hold by then."""


class Recorder(Protocol):
    """Of one device and one thread."""

    def record(self, run: Callable[[], None]) -> Replay:
        """Call `run`, which touches nothing but tensors of the device and returns nothing, as often as is needed to record it. The tensors it
        reads and writes must stay where they are; what it makes meanwhile may lie where others that were recorded have theirs, since two
        replays do not overlap."""
        ...
