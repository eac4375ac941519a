"""The least a join must do, for tests of what starts from its result: one worker, a store, no gateways."""

from services.scheduler.core.held_blocks import held_blocks
from services.scheduler.core.record import StoredRequest, StoredState
from services.scheduler.core.recovered import (
    Adoption,
    OrphanSlot,
    Recovered,
    RecoveredRequest,
    RecoveredWorker,
    SlotToDrop,
)
from tessera.values.report import SlotReport, WorkerReport


def join(state: StoredState, worker: str, report: WorkerReport, received: dict[bytes, tuple[int, ...]]) -> Recovered:
    """Tokens that gateways `received`, extended by the store's, then by those of the live slot with the highest attempt that is not
    behind; finishes only from the store."""
    recorded = state.blocks.get((worker, report.description.boot_id), {}).values()
    published = held_blocks(report, recorded)
    slots = {slot.request_id: slot for slot in sorted(report.slots, key=lambda slot: slot.attempt)}
    requests = [
        _recover(stored, received.get(request_id, ()), worker, slots.get(request_id))
        for request_id, stored in state.requests.items()
    ]
    adopted = {request.adoption.slot.slot for request in requests if request.adoption is not None}
    orphans, drops = [], []
    for slot in report.slots:
        stored = state.requests.get(slot.request_id)
        if stored is None:
            orphans.append(OrphanSlot(worker, slot))
        elif slot.slot not in adopted:
            drops.append(SlotToDrop(worker, slot.slot, slot.request_id, slot.attempt, stored.finish))
    return Recovered(
        last_record=state.last,
        requests=tuple(requests),
        workers=(RecoveredWorker(worker, report.description.boot_id, report.last_step + 1, published),),
        orphans=tuple(orphans),
        drops=tuple(drops),
    )


def _recover(stored: StoredRequest, received: tuple[int, ...], worker: str, slot: SlotReport | None) -> RecoveredRequest:
    output, adoption = received, None
    if stored.finish is not None or tuple(stored.output_token_ids[: len(output)]) == output:
        output = tuple(stored.output_token_ids)
    if slot is not None and stored.finish is None and slot.attempt >= stored.attempt:
        held = tuple(slot.token_ids[slot.prompt_len :].tolist())
        if held[: len(output)] == output:
            output, adoption = held, Adoption(worker, slot)
        elif output[: len(held)] == held:
            adoption = Adoption(worker, slot)
    return RecoveredRequest(
        submission=stored.submission,
        arrival=stored.arrival,
        subscriber=stored.subscriber,
        attempt=max(stored.attempt, slot.attempt if slot is not None else 0),
        output_token_ids=output,
        adoption=adoption,
        finish=stored.finish,
        num_cached_tokens=stored.num_cached_tokens,
        timings=stored.timings,
    )
