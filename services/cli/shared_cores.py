"""How the processes of one machine share its cores."""

import os


def let_finish() -> None:
    """From now on whatever this thread starts, and the thread itself, waits for a core until whoever has it blocks or has had his time, instead of
    taking it when a message arrives (Linux: SCHED_BATCH). The threads of a forward pass wait for each other, so one that is interrupted for
    a message costs the time of all; a message can wait for the end of a few kernels. Costs nothing on idle cores, where the system has no such thing, or
    where it is not allowed."""
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except (AttributeError, OSError):
        return
