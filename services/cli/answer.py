"""Ask a gateway and stream its answer: what `generate` and `up` share."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from tessera.v1.inference_pb2 import Finish, FinishReason, Generation, StreamGenerateRequest
from tessera.v1.inference_pb2_grpc import InferenceServiceStub

_CHANNEL_OPTIONS = [("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", 64 << 20)]


class AnswerFailed(Exception):
    """The request ended without an answer. `code` is the gRPC status; the message is for people."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer, and when its parts came, in seconds after the request was sent."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish: Finish
    first_token_s: float
    total_s: float


async def stream_answer(address: str, generation: Generation, write: Callable[[str], None], timeout_s: float) -> Answer:
    """Send `generation` to the gateway at `address`, hand each piece of text to `write`, return the whole. Raises AnswerFailed."""
    began_s = time.monotonic()
    pieces: list[str] = []
    token_ids: list[int] = []
    first_token_s = 0.0
    async with grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS) as channel:
        call = InferenceServiceStub(channel).StreamGenerate(StreamGenerateRequest(generation=generation), timeout=timeout_s)
        try:
            async for message in call:
                if message.token_ids and not token_ids:
                    first_token_s = time.monotonic() - began_s
                token_ids.extend(message.token_ids)
                pieces.append(message.text)
                write(message.text)
                if message.HasField("finish"):
                    total_s = time.monotonic() - began_s
                    return Answer(message.request_id, "".join(pieces), tuple(token_ids), message.finish, first_token_s, total_s)
        except grpc.aio.AioRpcError as error:
            raise AnswerFailed(error.code(), error.details() or "no details") from error
    raise AnswerFailed(grpc.StatusCode.INTERNAL, "the stream ended without a finish")


def summary(answer: Answer) -> str:
    """One line for people: why it ended, tokens, and times as this client saw them."""
    usage = answer.finish.usage
    reason = FinishReason.Name(answer.finish.reason).removeprefix("FINISH_REASON_").lower()
    decode_s = answer.total_s - answer.first_token_s
    rate = (
        f", then {(usage.completion_tokens - 1) / decode_s:.1f} tokens/s"
        if usage.completion_tokens > 1 and decode_s > 0
        else ""
    )
    cached = f" ({usage.cached_tokens} from cache)" if usage.cached_tokens else ""
    message = f": {answer.finish.message}" if answer.finish.message else ""
    return (
        f"[{reason}{message}; prompt {usage.prompt_tokens} tokens{cached}, answer {usage.completion_tokens} tokens; "
        f"first after {answer.first_token_s:.2f} s{rate}]"
    )


def write_piece(text: str) -> None:
    """Show a piece of text on standard output at once."""
    sys.stdout.write(text)
    sys.stdout.flush()
