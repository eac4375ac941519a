"""Going on from what a worker holds: at an attach, and at the start of a term."""

from collections import defaultdict
from collections.abc import Container

import numpy as np

from services.scheduler.core.fleet import check_layout
from services.scheduler.core.held_blocks import held_blocks
from services.scheduler.core.ledger import Ledger
from services.scheduler.core.lifecycle import Lifecycle
from services.scheduler.core.recovered import Adoption, Recovered, RecoveredRequest
from services.scheduler.core.replica import Replica
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.sequence_status import SequenceStatus
from services.scheduler.core.tokens import Tokens
from tessera.values.batch import NO_BLOCKS, SlotDrop
from tessera.values.config import Config
from tessera.values.report import SlotReport, WorkerReport
from tessera.values.request import Submission


def new_ledger(submission: Submission, output_token_ids: tuple[int, ...]) -> Ledger:
    """Committed tokens of a request, nothing computed."""
    return Ledger(Tokens(submission.prompt_token_ids, output_token_ids))


def attach(
    lifecycle: Lifecycle, config: Config, name: str, report: WorkerReport, now_us: int, forgotten: Container[bytes] | None
) -> None:
    """Put a replica made from `report` in the place of the worker's earlier one, if there is one.

    A live sequence whose slot is reported goes on in it: one that runs on this worker, and one that waits (its worker was thought lost,
    or was not there at the join, or it was preempted in a batch that the worker never started). All others of this worker wait.
    Prefix-cache entries are kept as far as they hold. A slot of an unknown request, but not of one that ended here and was `forgotten`, is
    kept for it; where `forgotten` is None, none is.
    """
    lifecycle.fleet.check(name, report.description)
    earlier = lifecycle.fleet.get(name)
    replica = Replica(name, report, config)
    for request_id, attempt in replica.attempts.items():
        seen = lifecycle.book.get(request_id)
        if seen is not None:
            seen.attempt_floor = max(seen.attempt_floor, attempt)
    slots = _slots_to_go_on_in(lifecycle, name, report)
    orphans: dict[bytes, SlotReport] = {}
    for slot in sorted(report.slots, key=lambda slot: slot.attempt, reverse=True):
        if slots.get(slot.request_id) is slot:
            continue
        known = lifecycle.book.get(slot.request_id)
        is_unknown = known is None and forgotten is not None and slot.request_id not in forgotten
        if is_unknown and slot.request_id not in orphans:
            orphans[slot.request_id] = slot
        else:
            replica.drop_reported(slot, known.finish if known is not None else None)
    recorded = earlier.manager.published() if earlier is not None and earlier.boot_id == replica.boot_id else ()
    if earlier is not None:
        lifecycle.lose(earlier)
    held = _leave_the_queue(lifecycle, slots)
    replica.adopt(held, orphans.values(), held_blocks(report, recorded))
    if earlier is not None:
        replica.succeed(earlier)
    lifecycle.fleet.put(replica)
    for sequence, _ in held:
        if sequence.output_len:
            sequence.note_tokens(now_us)


def _leave_the_queue(lifecycle: Lifecycle, slots: dict[bytes, SlotReport]) -> list[tuple[Sequence, SlotReport]]:
    """The waiting sequences that go on in these slots, in order of admission."""
    held: list[tuple[Sequence, SlotReport]] = []
    for request_id, slot in slots.items():
        sequence = lifecycle.book.get(request_id)
        assert sequence is not None
        lifecycle.waiting.remove(sequence)
        lifecycle.book.touch(sequence)
        held.append((sequence, slot))
    held.sort(key=lambda pair: (not pair[0].admission, pair[0].admission, pair[0].arrival))
    for sequence, _ in held:
        if not sequence.admission:  # admitted by an earlier leader, by a worker that was not there at the join
            sequence.admission = lifecycle.next_admission()
    return held


def _slots_to_go_on_in(lifecycle: Lifecycle, name: str, report: WorkerReport) -> dict[bytes, SlotReport]:
    """Per request the reported slot with the highest attempt, where that is not behind and its KV is the request's own."""
    chosen: dict[bytes, SlotReport] = {}
    shared = _shared_blocks(report)
    for slot in sorted(report.slots, key=lambda slot: slot.attempt):
        sequence = lifecycle.book.get(slot.request_id)
        if (
            sequence is not None
            and sequence.finish is None
            and sequence.worker in ("", name)
            and slot.attempt >= sequence.attempt
            and sequence.can_go_on_in(slot, _block_size(report), shared)
        ):
            chosen[slot.request_id] = slot
    return chosen


def restore(lifecycle: Lifecycle, config: Config, recovered: Recovered, reports: dict[str, WorkerReport], now_us: int) -> None:
    """Fill an unused scheduler with what a join yielded; `reports` are those of the workers it names."""
    described = {worker.worker: reports[worker.worker].description for worker in recovered.workers}
    for name, description in described.items():
        lifecycle.fleet.check(name, description)
        check_layout(name, description.geometry, next(iter(described.values())).geometry)
    replicas = {worker.worker: Replica(worker.worker, reports[worker.worker], config) for worker in recovered.workers}
    held: dict[str, list[tuple[Sequence, SlotReport]]] = {name: [] for name in replicas}
    slots: dict[bytes, list[SlotReport]] = defaultdict(list)
    for report in reports.values():
        for slot in report.slots:
            slots[slot.request_id].append(slot)
    shared = {name: _shared_blocks(report) for name, report in reports.items()}
    for item in sorted(recovered.requests, key=lambda item: item.arrival):
        sequence = _recovered_sequence(item, now_us)
        if item.finish is not None:
            lifecycle.begin(sequence)
            lifecycle.end(sequence, item.finish, now_us)
            sequence.timings = item.timings
        elif item.adoption is not None and _can_adopt(sequence, item.adoption, reports, shared):
            lifecycle.enter(sequence)
            sequence.admission = lifecycle.next_admission()
            held[item.adoption.worker].append((sequence, item.adoption.slot))
        else:
            lifecycle.begin(sequence)
            # A slot of an earlier attempt its last leader had moved on from itself.
            latest = (slot for slot in slots.get(sequence.request_id, ()) if slot.attempt == item.attempt)
            sequence.stranded_len = sequence.held_in(latest)
            if item.adoption is not None:
                replicas[item.adoption.worker].drop_reported(item.adoption.slot, None)
    for drop in recovered.drops:
        replicas[drop.worker].drops.append(SlotDrop(drop.slot, drop.request_id, drop.attempt, drop.finish))
    for worker in recovered.workers:
        replica = replicas[worker.worker]
        orphans = [orphan.slot for orphan in recovered.orphans if orphan.worker == replica.name]
        replica.adopt(held[replica.name], orphans, worker.published)
        for sequence, _ in held[replica.name]:
            sequence.held_len = sequence.ledger.computed_len
        replica.next_step = worker.next_step
        lifecycle.fleet.put(replica)


def adopt_orphans(lifecycle: Lifecycle, sequence: Sequence) -> int:
    """A new, waiting sequence goes on in the orphaned slot of its id with the highest attempt that agrees; the others are given up.
    Returns how many of them contradict it."""
    request_id = sequence.request_id
    replicas = [replica for replica in lifecycle.fleet if request_id in replica.attempts]
    if not replicas:
        return 0
    num_contradictions = 0
    sequence.attempt_floor = max(replica.attempts[request_id] for replica in replicas)
    owners = [replica for replica in replicas if request_id in replica.orphans]
    owners.sort(key=lambda replica: replica.orphans[request_id].slot.attempt, reverse=True)
    for replica in owners:
        slot = replica.orphans[request_id].slot
        if sequence.status is SequenceStatus.WAITING and _can_take(sequence, slot, replica):
            lifecycle.waiting.remove(sequence)
            sequence.admission = lifecycle.next_admission()
            replica.adopt_orphan(sequence)
            sequence.held_len = sequence.ledger.computed_len
        else:
            num_contradictions += not sequence.agrees_with(slot)
            replica.drop_orphan(request_id)
    if sequence.status is SequenceStatus.WAITING:
        given_up = (replica.given_up.get(request_id) for replica in replicas)
        sequence.stranded_len = sequence.held_in(slot for slot in given_up if slot is not None)
    return num_contradictions


def _recovered_sequence(item: RecoveredRequest, now_us: int) -> Sequence:
    """A waiting sequence; its clock goes on from the durations known, since clocks of two processes cannot be compared."""
    timings = item.timings
    sequence = Sequence(
        submission=item.submission,
        arrival=item.arrival,
        arrived_us=now_us - max(timings.queue_us, timings.ttft_us),
        ledger=new_ledger(item.submission, item.output_token_ids),
        subscriber=item.subscriber,
        attempt=item.attempt,
        attempt_floor=item.attempt,
        num_cached_tokens=item.num_cached_tokens,
        timings=timings,
        tokens_max=item.tokens_max,
        logprobs=item.logprobs,
    )
    if item.prompt_logprobs is not None and sequence.prompt_logprobs is not None:
        sequence.prompt_logprobs.put(0, item.prompt_logprobs)
    return sequence


def _can_take(sequence: Sequence, orphan: SlotReport, replica: Replica) -> bool:
    """As `_can_adopt`. Others may have come to share any block that was full when the orphan was reported."""
    return sequence.can_go_on_in(orphan, replica.manager.block_size, orphan.block_table.tolist())


def _can_adopt(sequence: Sequence, adoption: Adoption, reports: dict[str, WorkerReport], shared: dict[str, set[int]]) -> bool:
    """Whether a sequence can go on in the slot that a join found for it."""
    return sequence.can_go_on_in(adoption.slot, _block_size(reports[adoption.worker]), shared[adoption.worker])


def _shared_blocks(report: WorkerReport) -> set[int]:
    """Blocks of the pool that lie in more than one of the reported tables."""
    tables = [slot.block_table for slot in report.slots if not slot.is_swapped]
    return set(np.flatnonzero(np.bincount(np.concatenate([NO_BLOCKS, *tables])) > 1).tolist())


def _block_size(report: WorkerReport) -> int:
    return report.description.geometry.block_size
