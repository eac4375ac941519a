"""One request between the session that feeds it and the call that serves it."""

import asyncio
from dataclasses import replace

import structlog

from gateway.delta import Delta, join_deltas
from gateway.errors import GatewayError
from gateway.output_stream import OutputStream
from gateway.tokenizer import Tokenizer
from services.gateway.refusals import refusal_of, too_late
from services.rpc.errors import Internal, InvalidArgument, ServiceError
from tessera.values.finish import Finish, FinishReason
from tessera.values.request import RequestOutput, RequestTimings, Submission
from tessera.values.session import Abort, Detach, LiveRequest, StopFound, Submit

_log = structlog.get_logger()

_PENDING_DELTAS_MAX = 64
"""Deltas a slow reader leaves before they are joined into one."""


class RequestStream:
    """State of one live request. Belongs to the event loop; one reader at a time.

    What arrives is detokenized at once, so a stop string ends the request however slowly its client reads, and waits as one growing
    piece: a slow reader costs the text it has not read, never a queue of frames. `prompt_field` is where the prompt stands in the
    client's message.
    """

    def __init__(self, submission: Submission, output: OutputStream, prompt_field: str) -> None:
        self.submission = submission
        self.prompt_field = prompt_field
        self.num_reserved = 0  # tokens that it may come to, as far as they count to limits
        self.farewell: Abort | Detach | None = None  # what the scheduler is told of the client that has left
        self.ended = False  # nothing more will come from the scheduler
        self.stop_found: StopFound | None = None
        self._output = output
        self._text_end = output.shown.text_bytes  # bytes of text given so far
        self._pending: list[Delta] = []
        self._failure: ServiceError | None = None
        self._changed = asyncio.Event()

    @property
    def request_id(self) -> bytes:
        """The internal id."""
        return self.submission.request_id

    @property
    def subscriber(self) -> int:
        """The client's resume number."""
        return self._output.subscriber

    @property
    def tokenizer(self) -> Tokenizer:
        """That of the answer."""
        return self._output.tokenizer

    @property
    def num_tokens(self) -> int:
        """Output tokens held, from the first on."""
        return len(self._output.token_ids)

    def go_on_as(self, request_id: bytes) -> None:
        """What was submitted here lives under another internal id."""
        self.submission = replace(self.submission, request_id=request_id)
        if self.farewell is not None:
            self.farewell = replace(self.farewell, request_id=request_id)

    def live(self) -> LiveRequest:
        """The entry of a Hello: what was received so far."""
        return LiveRequest(self.request_id, self.subscriber, tuple(self._output.token_ids))

    def submit(self) -> Submit:
        """The Submit of this request, with what was received so far."""
        return Submit(self.submission, self.subscriber, tuple(self._output.token_ids))

    def feed(self, output: RequestOutput) -> StopFound | None:
        """Take what the scheduler sent. Returns the stop string that this completes, if the scheduler does not know of an end yet.

        An output that does not fit fails this request only: see `failed`.
        """
        if output.subscriber != self.subscriber or self.ended:
            return None
        self.ended = output.finish is not None
        if self._failure is not None:
            return None
        try:
            delta = self._output.feed(output)
        except GatewayError as error:
            self.fail(refusal_of(error))
            return None
        except Exception as error:  # noqa: BLE001 - whatever one request's tokens do, its neighbours in the frame go on
            _log.error("an output could not be detokenized", request=self.request_id.hex(), exc_info=error)
            self.fail(Internal("this request's output could not be detokenized", reason="DETOKENIZER_FAILED"))
            return None
        if delta is not None:
            self._text_end = delta.text_offset + len(delta.text.encode())
            # An end found here is told below, once its usage and timings are there.
            self._append(replace(delta, finish=None) if delta.finish is not None else delta)
        end = self._output.finish
        if self.ended and end is not None and end.reason is FinishReason.DEADLINE:
            self.fail(too_late(end))
        elif self.ended:
            self._append(self._last_delta(output.num_cached_tokens, output.timings))
        elif delta is not None and delta.found_here:
            self.stop_found = self._found()
            return self.stop_found
        return None

    def end_aborted(self) -> None:
        """No scheduler knows this request, and it was to be aborted anyway."""
        held = self.num_tokens
        finish = Finish(FinishReason.ABORTED, held)
        self.feed(RequestOutput(self.request_id, self.subscriber, held, (), finish=finish))

    def close(self, error: ServiceError) -> None:
        """The scheduler will send nothing more; the call gets what has arrived, then `error`."""
        self.ended = True
        self.fail(error)

    def fail(self, error: ServiceError) -> None:
        """The call gets what has arrived, then `error`."""
        self._failure = self._failure or error
        self._changed.set()

    @property
    def unread_tokens(self) -> int:
        """Tokens that wait for the call to take them."""
        return sum(len(delta.token_ids) for delta in self._pending)

    @property
    def failed(self) -> bool:
        """Whether the call ends with an error."""
        return self._failure is not None

    @property
    def refused(self) -> bool:
        """Whether that error is the client's own: what it says it was shown is not of this answer."""
        return isinstance(self._failure, InvalidArgument)

    async def next_delta(self) -> Delta:
        """Everything new, as one piece; waits for something. The last one carries `finish`. Raises the error of `fail`."""
        await self._changed.wait()
        if not self._pending:
            assert self._failure is not None, "woken for nothing"
            raise self._failure
        delta = join_deltas(self._pending) if len(self._pending) > 1 else self._pending[0]
        self._pending.clear()
        if self._failure is None:
            self._changed.clear()
        return delta

    def _append(self, delta: Delta) -> None:
        self._pending.append(delta)
        if len(self._pending) >= _PENDING_DELTAS_MAX:
            self._pending[:] = [join_deltas(self._pending)]
        self._changed.set()

    def _found(self) -> StopFound:
        finish = self._output.finish
        assert finish is not None and finish.stop_string is not None, "only stop strings are found here"
        return StopFound(self.request_id, self.subscriber, finish.output_len, finish.stop_string)

    def _last_delta(self, num_cached_tokens: int, timings: RequestTimings | None) -> Delta:
        return Delta(
            token_offset=self._output.token_offset,
            token_ids=(),
            text_offset=self._text_end,
            text="",
            num_cached_tokens=num_cached_tokens,
            finish=self._output.finish,
            timings=timings,
        )
