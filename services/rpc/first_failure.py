"""The one exception that ended a task group."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def first_failure(kind: type[Exception]) -> Iterator[None]:
    """Raise the first exception of `kind` by itself where a task group inside ends by exceptions of that kind only.

    (Python 3.11.2, which Debian 12 has, wraps what is raised inside `except*` in a group again; later releases do not.)
    """
    try:
        yield
    except BaseExceptionGroup as group:
        matching, others = group.split(kind)
        if matching is None or others is not None:
            raise
        first: BaseException = matching
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None
