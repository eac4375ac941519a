"""What a worker does for traced requests, as spans: `worker prefill` from the entry into a slot to the first token that comes of it,
`worker decode` from then until the slot is dropped, under the span of the client's call.

Counted in columns by slot, so a step costs the same few array operations for one traced request as for hundreds, and none without.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from opentelemetry.trace import Span

from model_worker.batch_refused import BatchRefused
from services.rpc.spans import Tracing
from services.worker.engine_thread import Outcome
from tessera.values.batch import ScheduledBatch, ScheduledBatchOutput, SlotEntry

PREFILL, DECODE = "worker prefill", "worker decode"


@dataclass(slots=True)
class _Stay:
    """A traced sequence in its slot, and the span under way."""

    entry: SlotEntry
    span: Span


class SlotTraces:
    """Told of every batch in the engine's thread; `close` comes after the last."""

    def __init__(self, tracing: Tracing, num_slots: int, worker: str, unix_ns: Callable[[], int] = time.time_ns) -> None:
        """`num_slots`: slots are below it. `worker` names this one."""
        self._tracing = tracing
        self._worker = worker
        self._unix_ns = unix_ns
        self._stays: dict[int, _Stay] = {}  # by slot
        self._prefilling: set[int] = set()  # of these, those without a token
        self._steps = np.zeros(num_slots, np.int64)  # of the span under way, by slot, as the next two
        self._positions = np.zeros(num_slots, np.int64)
        self._tokens = np.zeros(num_slots, np.int64)

    def note(self, batch: ScheduledBatch, outcome: Outcome) -> None:
        """One batch was executed; one that was refused changed nothing."""
        if isinstance(outcome, BatchRefused) or not (self._stays or batch.entries):
            return
        now_ns = self._unix_ns()
        began_ns = now_ns - 1000 * outcome.compute_us
        for drop in batch.drops:
            stay = self._stays.get(drop.slot)
            if stay is not None and (stay.entry.request_id, stay.entry.attempt) == (drop.request_id, drop.attempt):
                reason = drop.finish.reason.name.lower() if drop.finish is not None else "left"
                self._leave(drop.slot, began_ns, reason)
        for entry in batch.entries:
            if entry.slot in self._stays:
                self._leave(entry.slot, began_ns, "entered again")
            if entry.trace_context:
                self._enter(entry, began_ns)
        if self._stays and batch.num_rows and not batch.is_dummy_run:
            self._count(batch, outcome, now_ns)

    def close(self) -> None:
        """The worker ends: what was under way goes on elsewhere."""
        for slot in list(self._stays):
            self._leave(slot, self._unix_ns(), "worker ended")

    def _count(self, batch: ScheduledBatch, output: ScheduledBatchOutput, now_ns: int) -> None:
        slots = batch.slots
        self._steps[slots] += 1
        self._positions[slots] += batch.num_scheduled_tokens
        self._tokens[slots] += output.token_counts
        if self._prefilling:
            for slot in [slot for slot in self._prefilling if self._tokens[slot]]:
                self._prefilling.remove(slot)
                stay = self._stays[slot]
                self._end(slot, stay, now_ns)
                self._begin(slot, stay, DECODE, now_ns)

    def _enter(self, entry: SlotEntry, at_ns: int) -> None:
        span = self._span(PREFILL, entry, at_ns)
        span.set_attribute("gen_ai.usage.cache_read.input_tokens", entry.num_cached_tokens)
        self._stays[entry.slot] = _Stay(entry, span)
        self._prefilling.add(entry.slot)
        self._clear(entry.slot)

    def _begin(self, slot: int, stay: _Stay, name: str, at_ns: int) -> None:
        stay.span = self._span(name, stay.entry, at_ns)
        self._clear(slot)

    def _leave(self, slot: int, at_ns: int, why: str) -> None:
        stay = self._stays.pop(slot)
        self._prefilling.discard(slot)
        stay.span.set_attribute("tessera.slot_end", why)
        self._end(slot, stay, at_ns)

    def _end(self, slot: int, stay: _Stay, at_ns: int) -> None:
        stay.span.set_attributes(
            {
                "tessera.steps": int(self._steps[slot]),
                "tessera.positions": int(self._positions[slot]),
                "gen_ai.usage.output_tokens": int(self._tokens[slot]),
            }
        )
        stay.span.end(at_ns)

    def _span(self, name: str, entry: SlotEntry, at_ns: int) -> Span:
        told: dict[str, str | int] = {
            "tessera.request_id": entry.request_id.hex(),
            "tessera.worker": self._worker,
            "tessera.slot": entry.slot,
            "tessera.attempt": entry.attempt,
            "gen_ai.usage.input_tokens": entry.prompt_len,
        }
        return self._tracing.begin(name, entry.trace_context, told, began_ns=at_ns)

    def _clear(self, slot: int) -> None:
        self._steps[slot] = self._positions[slot] = self._tokens[slot] = 0
