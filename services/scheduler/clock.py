"""The scheduler's clocks."""

import time


def now_us() -> int:
    """Microseconds on a clock that only goes forward; means nothing to another process."""
    return time.monotonic_ns() // 1000


def boot_us() -> int:
    """Microseconds on a clock that also goes on while the machine sleeps: for what others do meanwhile."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000
