"""Log lines about what is looked at again and again."""

from typing import Any


class Notice:
    """Writes a line when it differs from the one before it, so that a wait of an hour is one line."""

    def __init__(self, log: Any, *, is_fault: bool = True) -> None:
        """`is_fault` False: what is said is part of any start."""
        self._log = log
        self._write = log.warning if is_fault else log.info
        self._said: object = None

    def say(self, event: str, **details: object) -> None:
        """Something has to be waited for."""
        if self._said != (event, details):
            self._said = (event, details)
            self._write(event, **details)

    def end(self, event: str, **details: object) -> None:
        """It is over; nothing is written where nothing was said before."""
        if self._said is not None:
            self._said = None
            self._log.info(event, **details)
