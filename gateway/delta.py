"""One piece of an answer, and what the public API calls its end."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from tessera.values.finish import Finish, FinishReason
from tessera.values.logprobs import Logprobs, joined_logprobs, no_logprobs
from tessera.values.request import RequestTimings


class PublicReason(Enum):
    """How an answer ended, as clients are told."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    ERROR = "error"


PUBLIC_REASONS = {
    FinishReason.EOS: PublicReason.STOP,
    FinishReason.STOP_SEQUENCE: PublicReason.STOP,
    FinishReason.STOP_TOKEN: PublicReason.STOP,
    FinishReason.STOP_STRING: PublicReason.STOP,
    FinishReason.MAX_TOKENS: PublicReason.LENGTH,
    FinishReason.MAX_MODEL_LEN: PublicReason.LENGTH,
    FinishReason.ABORTED: PublicReason.ABORTED,
    FinishReason.UNSCHEDULABLE: PublicReason.ERROR,
    FinishReason.ERROR: PublicReason.ERROR,
    FinishReason.DEADLINE: PublicReason.ERROR,
}
"""Inside -> outside. The matched stop travels beside it, in the `Finish`."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What a client has not been shown yet. Offsets count from the start of the whole answer and are dense.

    `text` may be empty while `token_ids` is not: ids go out at once, their text waits while it could become a stop string or its last
    character is incomplete. `finish` is set in the last delta only. `found_here`: the gateway itself found that end (a stop
    string), so the scheduler must be told `finish`; such a delta has no `timings`. `logprobs` are of `token_ids`, None where none of them has
    any; `prompt_logprobs`, of every prompt token but the first, come with the first output token.
    """

    token_offset: int
    token_ids: tuple[int, ...]
    text_offset: int  # UTF-8 bytes
    text: str
    num_cached_tokens: int = 0  # of the prompt, as last reported
    finish: Finish | None = None
    timings: RequestTimings | None = None
    found_here: bool = False
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None

    @property
    def public_reason(self) -> PublicReason | None:
        """The end in the public API's terms; None while there is none."""
        return PUBLIC_REASONS[self.finish.reason] if self.finish else None


def join_deltas(deltas: Sequence[Delta]) -> Delta:
    """Consecutive deltas of one answer as one: a whole answer, or what a slow reader has missed. At least one is needed."""
    first, last = deltas[0], deltas[-1]
    return Delta(
        token_offset=first.token_offset,
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        text_offset=first.text_offset,
        text="".join(delta.text for delta in deltas),
        num_cached_tokens=last.num_cached_tokens,
        finish=last.finish,
        timings=last.timings,
        found_here=last.found_here,
        logprobs=_joined_logprobs(deltas),
        prompt_logprobs=first.prompt_logprobs,
    )


def _joined_logprobs(deltas: Sequence[Delta]) -> Logprobs | None:
    if all(delta.logprobs is None for delta in deltas):
        return None
    return joined_logprobs([delta.logprobs or no_logprobs(len(delta.token_ids)) for delta in deltas])
