"""A SIGTERM while a role's modules are still being imported: nothing has begun, so the process ends as one that was asked to."""

import os
import signal


def end_on_sigterm() -> None:
    """Let SIGTERM end this process with status 0 at once, until the role itself listens for it. Its imports take a second."""
    signal.signal(signal.SIGTERM, lambda _number, _frame: os._exit(0))
