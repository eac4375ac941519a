"""Log lines about what is looked at again and again."""

from typing import Any


class Notice:
    """Writes a line when it differs from the one before it, so that a wait of an hour is one line."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self._said: object = None

    def say(self, event: str, **details: object) -> None:
        """Something is as it should not be, or has to be waited for."""
        if self._said != (event, details):
            self._said = (event, details)
            self._log.warning(event, **details)

    def end(self, event: str, **details: object) -> None:
        """It is over; nothing is written where nothing was said before."""
        if self._said is not None:
            self._said = None
            self._log.info(event, **details)
