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

    @property
    def is_whole(self) -> bool:
        """Whether the answer came to an end of its own, not of an error or an abort."""
        return self.reason in (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely the model held one id: the natural logarithm of its own probability, before any sampling parameter. `text` is the token's
    part of a text, UTF-8; it may begin or end within a character."""

    token_id: int
    logprob: float
    text: bytes


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of one token: itself, how many ids are at least as likely (`rank`, itself included), the likeliest ids in descending order, and those
    that were asked for. `token` is None, and all else empty, for the first token of a prompt, and where nobody holds them any more."""

    token: TokenLogprob | None
    rank: int
    top: tuple[TokenLogprob, ...]
    asked: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. `token_ids` include the stop token. `logprobs` has one for each of them, `prompt_logprobs` one for each prompt token;
    empty where they were not asked for."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish: Finish
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an answer. Offsets count from the start of the answer, text in UTF-8 bytes; `finish` is set in the last piece only. `logprobs`
    has one for each of `token_ids`, `prompt_logprobs` one for each prompt token, with the first output token; empty where they were not
    asked for."""

    request_id: str
    text: str
    text_offset: int
    token_ids: tuple[int, ...]
    token_offset: int
    finish: Finish | None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


def joined(pieces: Sequence[Piece]) -> Answer:
    """The whole answer of all its pieces."""
    finish = pieces[-1].finish
    assert finish is not None, "the last piece has the finish"
    token_ids = tuple(token_id for piece in pieces for token_id in piece.token_ids)
    logprobs = tuple(logprobs for piece in pieces for logprobs in piece.logprobs)
    prompt_logprobs = next((piece.prompt_logprobs for piece in pieces if piece.prompt_logprobs), ())
    text = "".join(piece.text for piece in pieces)
    return Answer(pieces[-1].request_id, text, token_ids, finish, logprobs, prompt_logprobs)


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
