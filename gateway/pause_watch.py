"""Notices that this process did not run for a while: it was stopped, or its machine slept or was frozen.

What its clients did in the meantime arrives all at once then, and does not mean what it seems to: a client that left has most
likely gone on with its request somewhere else.
"""


class PauseWatch:
    """Looked at often, with the time of a clock that goes on in a pause (CLOCK_BOOTTIME). Times are seconds.

    A gap of more than `gap_max_s` between two looks is a pause. What is found up to `settle_s` later still counts as of it: it
    has waited in some queue.
    """

    def __init__(self, gap_max_s: float, settle_s: float, now_s: float) -> None:
        self._gap_max_s = gap_max_s
        self._settle_s = settle_s
        self._looked_s = now_s
        self._settled_s = now_s

    def look(self, now_s: float) -> bool:
        """Whether there was a pause just now, or what it left behind may still be coming in."""
        if now_s - self._looked_s > self._gap_max_s:
            self._settled_s = now_s + self._settle_s
        self._looked_s = now_s
        return now_s < self._settled_s
