"""The one way a worker says no to a whole batch."""


class BatchRefused(Exception):
    """A batch that does not fit what the worker holds or can do. It changed nothing; `reason` names the field and the limit."""

    def __init__(self, step_id: int, reason: str) -> None:
        super().__init__(f"step {step_id}: {reason}")
        self.step_id = step_id
        self.reason = reason
