"""One Execute stream: what is still to be sent, and how many batches of it are in flight."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator

import structlog

from model_worker.batch_refused import BatchRefused
from services.worker import convert
from services.worker.engine_thread import Outcome
from tessera.values.identity import Epoch
from tessera.worker.v1 import worker_pb2

_log = structlog.get_logger()


class ExecuteStream:
    """The sending half of an Execute stream. Belongs to the event loop; nothing here blocks.

    Bounded: outputs wait only for batches in flight (`in_flight` counts until an output is on its way), and a heartbeat is queued
    only when nothing else is.
    """

    def __init__(self, epoch: Epoch, nonce: int, heartbeat_s: float) -> None:
        self.in_flight = 0
        self.refused = False
        self._heartbeat = worker_pb2.ExecuteResponse(
            heartbeat=worker_pb2.Heartbeat(epoch=convert.epoch_to_proto(epoch), nonce=nonce)
        )
        self._heartbeat_s = heartbeat_s
        self._queue: deque[worker_pb2.ExecuteResponse] = deque()
        self._changed = asyncio.Event()
        self._end: BaseException | None = None
        self._ended = False

    def tell(self, outcome: Outcome) -> None:
        """Send how a batch went."""
        if isinstance(outcome, BatchRefused):
            self.refuse(outcome.step_id, outcome.reason)
        else:
            self._put(worker_pb2.ExecuteResponse(output=convert.output_to_proto(outcome)))

    def refuse(self, step_id: int, reason: str) -> None:
        """Send that a batch was refused. The stream stays open, but takes no more batches."""
        _log.error("batch refused", step=step_id, reason=reason)
        self.refused = True
        self._put(worker_pb2.ExecuteResponse(refused=worker_pb2.Refused(step_id=step_id, reason=reason)))

    def leave(self) -> None:
        """Send that the worker is to end. Batches are taken as ever."""
        self._put(worker_pb2.ExecuteResponse(leaving=worker_pb2.Leaving()))

    @property
    def has_ended(self) -> bool:
        """Whether nobody listens any more."""
        return self._ended

    def end(self, error: BaseException | None = None) -> None:
        """End the stream once what is queued has been sent: with OK, or with `error`. Later ends are no-ops."""
        if not self._ended:
            self._ended, self._end = True, error
            self._changed.set()

    async def responses(self) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        """What to send, as it comes: a heartbeat at once, and after every `heartbeat_s` of silence. Raises the error given to `end`."""
        yield self._heartbeat
        while True:
            while self._queue:
                response = self._queue.popleft()
                if response.WhichOneof("message") == "output":
                    self.in_flight -= 1
                yield response
            if self._ended:
                if self._end is not None:
                    raise self._end
                return
            self._changed.clear()
            try:
                async with asyncio.timeout(self._heartbeat_s):
                    await self._changed.wait()
            except TimeoutError:
                yield self._heartbeat

    def _put(self, response: worker_pb2.ExecuteResponse) -> None:
        if not self._ended:
            self._queue.append(response)
            self._changed.set()
