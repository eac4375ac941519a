"""The scheduler's clock."""

import time


def now_us() -> int:
    """Microseconds on a clock that only goes forward; means nothing to another process."""
    return time.monotonic_ns() // 1000
