"""The one exception that ended a task group."""

import asyncio
import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def first_failure(kind: type[Exception]) -> Iterator[None]:
    """Raise the first exception of `kind` by itself where a task group inside ends by exceptions of that kind only.

    What Python up to 3.12 leaves wrong behind a failed group is put right: one that fails once its body is over has cancelled its task
    and does not take that back, and with such a rest a later `asyncio.timeout` of 3.11.2 (Debian 12) cancels instead of timing out.
    (The same release wraps what is raised inside `except*` in a group again, hence the `split`.)
    """
    task = asyncio.current_task()
    assert task is not None, "a task group runs in a task"
    num_cancels = task.cancelling()
    try:
        yield
    except BaseExceptionGroup as group:
        while task.cancelling() > num_cancels:
            task.uncancel()
        matching, others = group.split(kind)
        if matching is None or others is not None:
            raise
        first: BaseException = matching
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None
