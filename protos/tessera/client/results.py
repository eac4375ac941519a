"""What a gateway answers, as plain values."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class FinishReason(Enum):
    """How an answer ended."""

    STOP = "stop"  # a stop string, a stop token or the end of sequence
    LENGTH = "length"  # max_tokens or the model's length
    ABORTED = "aborted"
    ERROR = "error"  # see `Finish.message`


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens. `cached_tokens` of the prompt were computed for an earlier request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Microseconds on the scheduler's clock: arrival to first scheduling, to first token, per token after it, to the end.

    `num_preemptions`: how often the request had to make room for others in between.
    """

    queue_us: int
    ttft_us: int
    tpot_us: int
    total_us: int
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of an answer. `stop_token_id` or `stop_string` is what matched, where something did."""

    reason: FinishReason
    stop_token_id: int | None
    stop_string: str | None
    usage: Usage
    timings: Timings
    message: str


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. `token_ids` include the stop token."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish: Finish


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an answer. Offsets count from the start of the answer, text in UTF-8 bytes; `finish` is set in the last piece only."""

    request_id: str
    text: str
    text_offset: int
    token_ids: tuple[int, ...]
    token_offset: int
    finish: Finish | None


def joined(pieces: Sequence[Piece]) -> Answer:
    """The whole answer of all its pieces."""
    finish = pieces[-1].finish
    assert finish is not None, "the last piece has the finish"
    token_ids = tuple(token_id for piece in pieces for token_id in piece.token_ids)
    return Answer(pieces[-1].request_id, "".join(piece.text for piece in pieces), token_ids, finish)


@dataclass(frozen=True, slots=True)
class Model:
    """A served model. Lengths are prompt plus output, in tokens; `max_request_len` is what the workers' memory allows."""

    name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    max_request_len: int
