"""What operators may see and change of a scheduler while it runs. Nothing here outlives the term but what the journal tells anyway: a next
leader admits requests, and drains no worker."""

from collections.abc import Mapping
from heapq import nsmallest
from typing import TypeAlias

from services.scheduler.core.lifecycle import Lifecycle
from services.scheduler.core.record import Arrival
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.validator import Validator
from tessera.values.admin import (
    AbortRequests,
    AdmissionSet,
    ListRequests,
    NoSuch,
    PageMark,
    PrefixCacheReset,
    RequestPage,
    RequestsAborted,
    RequestView,
    SetDrain,
    WorkerDrained,
    WorkerUndrained,
)
from tessera.values.finish import Finish, FinishReason

SweepMark: TypeAlias = Mapping[bytes, int]


class Administration:
    """Of one scheduler. Every command is applied at once, and the same command again changes nothing more."""

    def __init__(self, lifecycle: Lifecycle, validator: Validator) -> None:
        self._lifecycle = lifecycle
        self._validator = validator

    @property
    def is_admission_paused(self) -> bool:
        """Whether new requests are refused."""
        return self._validator.is_paused

    def set_admission(self, is_paused: bool) -> AdmissionSet:
        """Refuse new requests from now on, or take them again. What runs, waits or is resumed goes on."""
        self._validator.is_paused = is_paused
        return AdmissionSet(is_paused)

    def list_requests(self, asked: ListRequests, now_us: int) -> RequestPage:
        """The requests without an end, by arrival. One that comes while somebody turns the pages is on a later one."""
        after = Arrival(asked.after.epoch_number, asked.after.counter) if asked.after is not None else None
        live = (item for item in self._lifecycle.book if item.finish is None and (after is None or item.arrival > after))
        page = nsmallest(asked.page_size + 1, live, key=lambda item: item.arrival)
        shown, is_last = page[: asked.page_size], len(page) <= asked.page_size
        mark = None if is_last else PageMark(shown[-1].arrival.epoch_number, shown[-1].arrival.counter)
        return RequestPage(tuple(_view(sequence, now_us) for sequence in shown), mark)

    def abort(self, asked: AbortRequests, now_us: int) -> RequestsAborted | NoSuch:
        """End requests wherever they are, with their tokens so far."""
        if asked.request_id is not None:
            named = self._lifecycle.book.get(asked.request_id)
            if named is None or named.finish is not None:
                return NoSuch("id", f"no request {asked.request_id.hex()} waits or runs here")
            chosen = [named]
        else:
            book = self._lifecycle.book
            chosen = [item for item in book if item.finish is None and item.submission.principal == asked.principal]
        for sequence in chosen:
            self._lifecycle.end(sequence, Finish(FinishReason.ABORTED, sequence.output_len), now_us)
        return RequestsAborted(len(chosen))

    def set_drain(self, asked: SetDrain) -> WorkerDrained | WorkerUndrained | NoSuch:
        """Give a worker no more requests and its own to the others, as if it had said that it is to end; or let it serve again. What nobody
        else can take goes on where it is. Holds until the worker's process ends."""
        replica = self._lifecycle.fleet.get(asked.worker)
        if replica is None:
            there = ", ".join(sorted(item.name for item in self._lifecycle.fleet)) or "none"
            return NoSuch("address", f"no worker {asked.worker[:200]!r} is here; there are: {there}")
        if replica.is_drained != asked.is_drained:
            replica.is_drained = asked.is_drained
            if asked.is_drained:
                self._lifecycle.waiting.dissolve(replica.name)
            else:
                self._lifecycle.waiting.dissolve_all()  # whoever stands in a line chose it without this worker
        return WorkerDrained(replica.num_requests) if asked.is_drained else WorkerUndrained()

    def reset_prefix_cache(self) -> PrefixCacheReset:
        """Forget what is cached and no request holds. It counts for good once the journal has what changed and the `sweep_mark` of this
        moment `is_swept`: until then a worker's report can tell the next leader of it."""
        replicas = list(self._lifecycle.fleet)
        num_forgotten = sum(replica.forget_unused() for replica in replicas)
        return PrefixCacheReset(num_forgotten, sum(replica.manager.num_cached_blocks for replica in replicas))

    @property
    def sweep_mark(self) -> SweepMark:
        """Up to which step each worker is to forget dropped slots, by its boot id."""
        return {replica.boot_id: replica.sweep.wanted_step for replica in self._lifecycle.fleet}

    def is_swept(self, mark: SweepMark) -> bool:
        """Whether no worker that answers remembers a slot from before `mark`. One that is away is asked to forget when it comes back."""
        attached = self._lifecycle.fleet.attached
        return all(replica.sweep.done_step >= mark.get(replica.boot_id, 0) for replica in attached)


def _view(sequence: Sequence, now_us: int) -> RequestView:
    submission = sequence.submission
    return RequestView(
        request_id=sequence.request_id,
        client_request_id=submission.client_request_id,
        principal=submission.principal,
        status=sequence.status.name,
        prompt_len=len(submission.prompt_token_ids),
        output_len=sequence.output_len,
        num_cached_tokens=sequence.num_cached_tokens,
        age_ms=max(0, now_us - sequence.arrived_us) // 1000,
        worker=sequence.worker,
        priority=submission.priority,
    )
