"""What traced requests wait for, as spans: `queue`, `prefill`, `decode`, under the span of the client's call.

Made of what the journal is told anyway: a request's delta comes when it is taken in, admitted, gets its first token, loses its place or
ends, so a decode step costs nothing here. Their parent is the gateway's span and not one of this process, which may be killed: the next
leader finds the parent in the submission, and goes on under it with the phase that was under way.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from opentelemetry.trace import Span, StatusCode

from services.rpc.spans import Tracing
from services.scheduler.clock import now_us
from services.scheduler.core.record import RequestDelta
from services.scheduler.core.recovered import Recovered, RecoveredRequest
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.sequence_status import SequenceStatus
from services.scheduler.core.worker_loss import WorkerLoss
from tessera.values.finish import FinishReason
from tessera.values.request import Submission

QUEUE, PREFILL, DECODE = "queue", "prefill", "decode"

_HOLDS_KV = (SequenceStatus.RUNNING, SequenceStatus.SWAPPED)


@dataclass(slots=True)
class _Traced:
    """A live request, and the span of its phase. `before` is what was noted of it last."""

    submission: Submission
    arrived_us: int
    phase: str
    span: Span
    before: RequestDelta


class RequestTraces:
    """Those of one leader: `take_over` comes before its first turn, which tells of everything that an earlier leader had, `begun` after it."""

    def __init__(
        self,
        tracing: Tracing,
        epoch_number: int,
        scheduler: Scheduler,
        clock: Callable[[], int] = now_us,
        unix_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._tracing = tracing
        self._epoch_number = epoch_number
        self._scheduler = scheduler
        self._clock = clock
        self._unix_ns = unix_ns
        self._recovered: dict[bytes, RecoveredRequest] | None = None  # those that had not ended, until `begun`
        self._live: dict[bytes, _Traced] = {}
        self._lost: dict[str, WorkerLoss] = {}  # of the present turn

    def take_over(self, recovered: Recovered) -> None:
        """The first turn is about these requests."""
        self._recovered = {item.submission.request_id: item for item in recovered.requests if item.finish is None}

    def begun(self) -> None:
        """What comes from now on came to this leader."""
        self._recovered = None

    @contextmanager
    def losing(self, address: str, loss: WorkerLoss) -> Iterator[None]:
        """The requests that the turn in the body takes from this worker lost it."""
        self._lost = {address: loss}
        yield
        self._lost = {}

    def note(self, deltas: Iterable[RequestDelta]) -> None:
        """What one turn changed."""
        for delta in deltas:
            traced = self._live.get(delta.request_id)
            if traced is None and delta.submission is not None and delta.submission.trace_context:
                traced = self._take_in(delta, delta.submission)
            if traced is not None:
                self._advance(traced, delta)

    def close(self) -> None:
        """The term is over: what was under way goes on under the next leader."""
        for traced in self._live.values():
            traced.span.add_event("term over", {"tessera.epoch": self._epoch_number})
            traced.span.end()
        self._live.clear()

    def _take_in(self, delta: RequestDelta, submission: Submission) -> _Traced | None:
        sequence = self._scheduler.request(delta.request_id)
        earlier = self._recovered.get(delta.request_id) if self._recovered is not None else None
        if sequence is None or (self._recovered is not None and earlier is None):  # its end was an earlier leader's to tell
            return None
        phase, began_us = QUEUE, sequence.arrived_us
        if earlier is not None:
            phase = DECODE if earlier.timings.ttft_us else PREFILL if earlier.timings.queue_us else QUEUE
            began_us = self._clock()
        traced = _Traced(submission, sequence.arrived_us, phase, self._begin(submission, phase, self._unix(began_us)), delta)
        if earlier is not None:
            kept = {"tessera.kv_kept": earlier.adoption is not None}
            traced.span.set_attributes(_place(delta) if phase != QUEUE else {})
            traced.span.add_event("takeover", {"tessera.epoch": self._epoch_number, **kept, **_place(delta)})
        self._live[delta.request_id] = traced
        return traced

    def _advance(self, traced: _Traced, delta: RequestDelta) -> None:
        timings, arrived_us = delta.timings, traced.arrived_us
        self._tell_events(traced, delta)
        if traced.phase == QUEUE and (delta.status in _HOLDS_KV or timings.queue_us or timings.ttft_us):
            self._next_phase(traced, PREFILL, arrived_us + timings.queue_us)
            traced.span.set_attributes(_place(delta))
        if traced.phase == PREFILL and timings.ttft_us:
            traced.span.set_attribute("gen_ai.usage.cache_read.input_tokens", delta.num_cached_tokens)
            self._next_phase(traced, DECODE, arrived_us + timings.ttft_us)
            traced.span.set_attributes(_place(delta))
        traced.before = delta
        if delta.finish is not None:
            self._end(traced, delta)

    def _tell_events(self, traced: _Traced, delta: RequestDelta) -> None:
        before, span = traced.before, traced.span
        had_kv, has_kv = before.status in _HOLDS_KV, delta.status in _HOLDS_KV
        if delta.timings.num_preemptions > before.timings.num_preemptions:
            kv = "swapped" if delta.status is SequenceStatus.SWAPPED else "dropped"
            span.add_event("preempted", {"tessera.kv": kv, **_place(before)})
        elif had_kv and delta.worker != before.worker and delta.finish is None:
            loss = self._lost.get(before.worker)
            why = {"tessera.loss": loss.kind.value, "tessera.reason": loss.text} if loss is not None else {}
            span.add_event("worker lost" if loss is not None else "moved", {**why, **_place(before)})
        if has_kv and before.attempt and delta.attempt > before.attempt:
            span.add_event("resumed", {"tessera.attempt": delta.attempt, **_place(delta)})

    def _end(self, traced: _Traced, delta: RequestDelta) -> None:
        assert delta.finish is not None
        finish, span = delta.finish, traced.span
        span.set_attributes(
            {"gen_ai.usage.output_tokens": finish.output_len, "tessera.finish_reason": finish.reason.name.lower()}
        )
        if finish.reason in (FinishReason.ERROR, FinishReason.UNSCHEDULABLE):
            span.set_status(StatusCode.ERROR, finish.message)
        span.end(self._unix(traced.arrived_us + delta.timings.total_us))
        del self._live[delta.request_id]

    def _next_phase(self, traced: _Traced, phase: str, at_us: int) -> None:
        at_ns = self._unix(at_us)
        traced.span.end(at_ns)
        traced.phase, traced.span = phase, self._begin(traced.submission, phase, at_ns)

    def _begin(self, submission: Submission, phase: str, at_ns: int) -> Span:
        told: dict[str, str | int] = {
            "tessera.request_id": submission.request_id.hex(),
            "tessera.epoch": self._epoch_number,
            "gen_ai.request.id": submission.client_request_id,
            "gen_ai.usage.input_tokens": len(submission.prompt_token_ids),
        }
        return self._tracing.begin(phase, submission.trace_context, told, began_ns=at_ns)

    def _unix(self, at_us: int) -> int:
        """Unix time, ns, of a moment on the scheduler's clock."""
        return self._unix_ns() - 1000 * (self._clock() - at_us)


def _place(delta: RequestDelta) -> dict[str, str]:
    return {"tessera.worker": delta.worker} if delta.worker else {}
