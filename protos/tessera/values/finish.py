"""Why a request ended: the reasons inside the service and what the public API calls them."""

from dataclasses import dataclass
from enum import Enum


class FinishReason(Enum):
    """Reasons as the scheduler knows them (ATOM's `leave_reason`)."""

    EOS = "eos"
    STOP_SEQUENCE = "stop_sequence"
    STOP_TOKEN = "stop_token"  # reported as `stop_{token_id}`, as in ATOM
    STOP_STRING = "stop_string"
    MAX_TOKENS = "max_tokens"
    MAX_MODEL_LEN = "max_model_len"
    ABORTED = "aborted"
    DEADLINE = "deadline"
    UNSCHEDULABLE = "unschedulable"
    ERROR = "error"


CUT_SHORT = frozenset({FinishReason.ABORTED, FinishReason.DEADLINE, FinishReason.UNSCHEDULABLE, FinishReason.ERROR})
"""Reasons that do not follow from the tokens: they hold whatever the output is, and one computed anew may end so before it is as long as it was."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The one terminal mark of a request.

    `output_len` is the number of output tokens that count (the stop token included); later ones were cut.
    `stop_token_id` is set for EOS and STOP_TOKEN, `stop_string` for STOP_STRING, `message` for
    UNSCHEDULABLE, ERROR and DEADLINE (for people; names the limit and the number that broke it).
    `limit` is set for DEADLINE: the name of the one of `TimeLimits` that was over.
    """

    reason: FinishReason
    output_len: int
    stop_token_id: int | None = None
    stop_string: str | None = None
    message: str = ""
    limit: str = ""

    @property
    def label(self) -> str:
        """ATOM's string for the reason, e.g. `eos`, `max_tokens`, `stop_198`."""
        if self.reason is FinishReason.STOP_TOKEN:
            return f"stop_{self.stop_token_id}"
        return str(self.reason.value)
