"""How a worker was lost, and what that says about what it computed."""

from dataclasses import dataclass
from enum import Enum


class LossKind(Enum):
    """Who may be to blame."""

    LEFT = "left"  # nobody: it said so, or another Attach took its place; what had started is answered or reported
    BROKEN = "broken"  # whatever was in flight: the stream broke, or the worker fell silent or took too long
    REFUSED = "refused"  # the rows of a batch that it refused, or answered with nonsense; it lives


@dataclass(frozen=True, slots=True)
class WorkerLoss:
    """`step_id` is the batch refused; None where every batch in flight may be meant. `text` is for people."""

    kind: LossKind
    step_id: int | None = None
    text: str = ""


LEFT = WorkerLoss(LossKind.LEFT)
