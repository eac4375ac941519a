"""What the world can do to a scheduler that it cannot go on from by itself."""


class SchedulerError(Exception):
    """Base of the errors raised by this core."""


class ModelMismatch(SchedulerError):
    """A worker serves another model than the group does; it must not be used."""


class BadOutput(SchedulerError):
    """A worker's output does not fit the batch it answers; nothing was applied, and the worker must be attached again."""
