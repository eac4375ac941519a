"""One answer over as many streams as it takes: what was received, what to ask next, and whether to go on after a failure. No I/O.

answer = ResumableAnswer(generation, ResumePolicy(gateways=2), first_gateway=0)
... send answer.request(now_s) to gateway number answer.gateway
... give each message to answer.take, and what that returns to the caller
... on an error: match answer.failed(error, now_s) with Retry(delay_s) -> wait, and send answer.request again; GiveUp() -> raise the error
"""

import random
from dataclasses import dataclass

import grpc

from tessera.client.connection import RESUME_TIMEOUT_S
from tessera.client.errors import ErrorDetails, InternalError, TesseraError
from tessera.client.results import Piece, TokenLogprobs
from tessera.v1 import inference_pb2 as pb

BACKOFF_MIN_S = 0.05
BACKOFF_MAX_S = 1.0
"""Pause after every gateway has failed once, doubled with each further failure up to the second; of that, half to all is taken."""

OTHERS_RETRY_S = 0.25
"""Longest wait that an unavailable gateway can ask for where another one can be asked meanwhile."""

STANDING_S = 30.0
"""A stream that stood so long and then broke was served, though nothing came: longer than a gateway looks for a scheduler by default."""

_TRANSPORT_TEXTS = ("Stream removed", "Received RST_STREAM", "Received http2 header with status", "No status received")
"""How gRPC's own explanations begin where a stream ended without a status from the server."""


@dataclass(frozen=True, slots=True)
class ResumePolicy:
    """`gateways` is how many there are. `resume_timeout_s` bounds the time from a failure to the next new piece of the answer; 0 turns
    resuming off. `retry_overloaded`: a first try that ends with RESOURCE_EXHAUSTED is tried again too, when the server says."""

    gateways: int
    resume_timeout_s: float = RESUME_TIMEOUT_S
    retry_overloaded: bool = False


@dataclass(frozen=True, slots=True)
class Retry:
    """Ask again in `delay_s` seconds."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The error is the caller's."""


class ResumableAnswer:
    """State of one answer. `generation` must have a request_id, and a seed unless greedy: every try sends it unchanged.

    `gateway` is the number of the one to ask next, `failures` counts those since something new came.
    """

    def __init__(self, generation: pb.Generation, policy: ResumePolicy, first_gateway: int) -> None:
        assert generation.request_id, "what has no name cannot be resumed"
        assert 0 <= first_gateway < policy.gateways, f"no gateway {first_gateway} of {policy.gateways}"
        self.gateway = first_gateway
        self.failures = 0
        self.is_finished = False
        self._generation = generation
        self._policy = policy
        self._number = 0  # of the present try: 0, then that of the resume
        self._token_ids: list[int] = []
        self._text = bytearray()  # UTF-8
        self._asked_s = 0.0
        self._failing_since_s = 0.0  # has a meaning while `failures` is above 0

    @property
    def request_id(self) -> str:
        """The client's id of the request."""
        return self._generation.request_id

    @property
    def received_tokens(self) -> int:
        """How many tokens of the answer are here."""
        return len(self._token_ids)

    def request(self, now_s: float) -> pb.StreamGenerateRequest:
        """The message of the next try, which is sent now."""
        self._asked_s = now_s
        request = pb.StreamGenerateRequest(generation=self._generation)
        if self._number > 0:
            request.resume.number = self._number
            request.resume.token_offset = len(self._token_ids)
            request.resume.text_offset = len(self._text)
            request.resume.token_ids.extend(self._token_ids)
        return request

    def take(self, piece: Piece) -> Piece | None:
        """What is new in `piece`; None where nothing is. Raises InternalError where it does not continue what is here."""
        assert not self.is_finished, "nothing follows the finish"
        token_ids, text = self._new_token_ids(piece), self._new_text(piece)
        if not token_ids and not text and piece.finish is None:
            return None
        new = Piece(
            piece.request_id,
            text,
            len(self._text),
            token_ids,
            len(self._token_ids),
            piece.finish,
            self._new_logprobs(piece, len(token_ids)),
            piece.prompt_logprobs if token_ids and not self._token_ids else (),
        )
        self._token_ids.extend(token_ids)
        self._text += text.encode()
        self.failures = 0
        self.is_finished = piece.finish is not None
        return new

    def ended(self) -> TesseraError:
        """The error of a stream that ended well, but without a finish."""
        return self._bug("NO_FINISH", "the stream ended without a finish")

    def failed(self, error: TesseraError, now_s: float) -> Retry | GiveUp:
        """The present try ended with `error`, which gets the request's id and the count of tokens received."""
        assert not self.is_finished, "an answer that is whole cannot fail"
        error.request_id, error.received_tokens = self.request_id, len(self._token_ids)
        if not self._is_resumed(error):
            return GiveUp()
        was_served = not error.details.reason and now_s - self._asked_s >= STANDING_S
        if self.failures == 0 or was_served:
            self.failures, self._failing_since_s = 0, now_s
        self.failures += 1
        left_s = self._failing_since_s + self._policy.resume_timeout_s - now_s
        if left_s <= 0:
            return GiveUp()
        self._number += 1
        self.gateway = (self.gateway + 1) % self._policy.gateways
        return Retry(min(self._delay_s(error), left_s))

    def _is_resumed(self, error: TesseraError) -> bool:
        if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            if error.details.retry_after_ms is None:
                return False  # a message beyond a limit, or a request that was given up: it is no better later
            return self._number > 0 or bool(self._token_ids) or self._policy.retry_overloaded
        return is_broken(error)

    def _delay_s(self, error: TesseraError) -> float:
        doublings = self.failures - self._policy.gateways
        longest_s = min(BACKOFF_MIN_S * 2 ** min(doublings, 10), BACKOFF_MAX_S) if doublings >= 0 else 0.0
        asked_s = (error.details.retry_after_ms or 0) / 1000
        if error.code is grpc.StatusCode.UNAVAILABLE and self._policy.gateways > 1:
            asked_s = min(asked_s, OTHERS_RETRY_S)
        return max(longest_s * random.uniform(0.5, 1.0), asked_s)

    def _new_token_ids(self, piece: Piece) -> tuple[int, ...]:
        known = len(self._token_ids) - piece.token_offset
        if known < 0:
            raise self._bug("OUTPUT_GAP", f"tokens from {piece.token_offset} on came after {len(self._token_ids)}")
        again = piece.token_ids[:known]
        if again != tuple(self._token_ids[piece.token_offset : piece.token_offset + len(again)]):
            raise self._bug("OUTPUT_CONTRADICTED", f"tokens from {piece.token_offset} on came again, and are others")
        return piece.token_ids[known:]

    def _new_logprobs(self, piece: Piece, num_new: int) -> tuple[TokenLogprobs, ...]:
        """Those of the piece's last `num_new` tokens."""
        sampling = self._generation.sampling
        is_asked = sampling.HasField("logprobs") or bool(sampling.logprob_token_ids)
        if len(piece.logprobs) != (len(piece.token_ids) if is_asked else 0):
            text = f"{len(piece.token_ids)} tokens came with the log-probabilities of {len(piece.logprobs)}"
            raise self._bug("LOGPROBS_MISSING", text)
        return piece.logprobs[len(piece.logprobs) - num_new :] if is_asked else ()

    def _new_text(self, piece: Piece) -> str:
        known = len(self._text) - piece.text_offset
        if known < 0:
            raise self._bug("OUTPUT_GAP", f"text from byte {piece.text_offset} on came after {len(self._text)}")
        text = piece.text.encode()
        again = text[:known]
        if again != self._text[piece.text_offset : piece.text_offset + len(again)]:
            raise self._bug("OUTPUT_CONTRADICTED", f"text from byte {piece.text_offset} on came again, and is other text")
        return text[known:].decode()

    def _bug(self, reason: str, message: str) -> InternalError:
        error = InternalError(message, grpc.StatusCode.INTERNAL, ErrorDetails(reason=reason))
        error.request_id, error.received_tokens = self.request_id, len(self._token_ids)
        return error


def is_broken(error: TesseraError) -> bool:
    """Whether the call did not fail by itself: nobody could answer, or what lies between broke. Asked again it can succeed.

    CANCELLED counts, because who cancels a call is not told of its error.
    """
    if error.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return True
    is_odd = error.code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
    return is_odd and not error.details.reason and error.message.startswith(_TRANSPORT_TEXTS)
