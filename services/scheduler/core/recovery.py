"""The join at a takeover: one state from what the store, the workers and the gateways know.

The store has what was promised, a worker what is physical, a gateway what it was sent. A decision that none of them saw never happened.
Nothing here is changed or freed: the result says what goes on, what waits, what ends and what is dropped.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from services.scheduler.core.held_blocks import held_blocks
from services.scheduler.core.kept_logprobs import KeptLogprobs
from services.scheduler.core.record import StoredRequest, StoredState
from services.scheduler.core.recovered import (
    Adoption,
    OrphanSlot,
    Recovered,
    RecoveredRequest,
    RecoveredWorker,
    SlotToDrop,
)
from tessera.values.finish import CUT_SHORT, Finish
from tessera.values.report import DroppedSlot, SlotReport, WorkerReport
from tessera.values.request import Submission
from tessera.values.sampling import SamplingParams

Tokens: TypeAlias = tuple[int, ...]

StopRule: TypeAlias = Callable[[Submission, Tokens], Finish | None]
"""(submission, its output) -> the earliest stop in that output."""


@dataclass(frozen=True, slots=True)
class GatewayClaim:
    """What one gateway says of a request that it still streams: the output ids received so far, from offset 0."""

    request_id: bytes
    subscriber: int
    token_ids: Tokens


@dataclass(frozen=True, slots=True)
class _LiveSlot:
    worker: str
    slot: SlotReport


@dataclass(slots=True)
class _Sources:
    """All that is said of one request, apart from the store."""

    live: list[_LiveSlot] = field(default_factory=list)
    dropped: list[DroppedSlot] = field(default_factory=list)
    claims: list[GatewayClaim] = field(default_factory=list)


def join(
    stored: StoredState, reports: dict[str, WorkerReport], claims: Iterable[GatewayClaim], stop_rule: StopRule
) -> Recovered:
    """What a new leader starts from. `reports` are the attached workers' by name; `stored` was read after they were attached."""
    sources: dict[bytes, _Sources] = defaultdict(_Sources)
    for worker, report in reports.items():
        for slot in report.slots:
            sources[slot.request_id].live.append(_LiveSlot(worker, slot))
        for dropped in report.dropped:
            sources[dropped.request_id].dropped.append(dropped)
    for claim in claims:
        sources[claim.request_id].claims.append(claim)
    joined = [_join_request(request, sources[key], stop_rule) for key, request in stored.requests.items()]
    orphans, drops = _orphans(said for key, said in sources.items() if key not in stored.requests)
    return Recovered(
        last_record=stored.last,
        requests=tuple(item.request for item in joined),
        workers=tuple(_recovered_worker(worker, report, stored) for worker, report in reports.items()),
        orphans=orphans,
        drops=(*(drop for item in joined for drop in item.drops), *drops),
        num_contradictions=sum(item.num_contradictions for item in joined),
    )


@dataclass(frozen=True, slots=True)
class _Joined:
    request: RecoveredRequest
    drops: tuple[SlotToDrop, ...]
    num_contradictions: int


def _join_request(stored: StoredRequest, said: _Sources, stop_rule: StopRule) -> _Joined:
    live = sorted(said.live, key=lambda item: (item.slot.attempt, len(item.slot.token_ids)), reverse=True)
    promised, computed = _token_sources(stored, said)
    tokens = _join_tokens(promised)
    if not _lacks_logprobs(stored.submission.sampling, tokens):
        tokens = _join_tokens([*promised, *computed])
    num_contradictions = sum(not _agree(source, tokens) for source in (*promised, *computed))
    finish = _terminal_mark(stored, said, tokens) or stop_rule(stored.submission, tokens)
    if finish is not None:
        tokens = tokens[: finish.output_len]
    adopted = None if finish is not None else _slot_to_adopt(stored, live, tokens)
    attempts = [item.slot.attempt for item in live] + [item.attempt for item in said.dropped]
    request = RecoveredRequest(
        submission=stored.submission,
        arrival=stored.arrival,
        subscriber=max([stored.subscriber, *(claim.subscriber for claim in said.claims)]),
        attempt=max([stored.attempt, *attempts]),
        output_token_ids=tokens,
        adoption=None if adopted is None else Adoption(adopted.worker, adopted.slot),
        finish=finish,
        num_cached_tokens=stored.num_cached_tokens,
        timings=stored.timings,
        tokens_max=stored.tokens_max,
        logprobs=_logprobs_of(stored, tokens),
        prompt_logprobs=stored.prompt_logprobs,
    )
    drops = tuple(_drop(item, finish) for item in live if item is not adopted)
    return _Joined(request, drops, num_contradictions)


def _token_sources(stored: StoredRequest, said: _Sources) -> tuple[list[Tokens], list[Tokens]]:
    """Outputs by precedence, those promised to somebody: gateways', the longest first, and the store's; and the workers', the highest
    attempt first. A worker keeps no log-probabilities: who wants them has what nobody was promised computed again."""
    gateways = sorted((claim.token_ids for claim in said.claims), key=len, reverse=True)
    slots = [item.slot for item in said.live] + said.dropped
    slots.sort(key=lambda slot: (slot.attempt, len(slot.token_ids)), reverse=True)
    return [*gateways, tuple(stored.output_token_ids)], [*map(_output_of, slots)]


def _join_tokens(sources: list[Tokens]) -> Tokens:
    """The first source, extended by each later one that continues it."""
    tokens: Tokens = ()
    for source in sources:
        if source[: len(tokens)] == tokens:
            tokens = source
    return tokens


def _logprobs_of(stored: StoredRequest, tokens: Tokens) -> KeptLogprobs | None:
    """Those that the store has of these tokens, as far as they are its own."""
    if stored.logprobs is None:
        return None
    kept = stored.logprobs.copy()
    differing = (at for at, pair in enumerate(zip(tokens, stored.output_token_ids, strict=False)) if pair[0] != pair[1])
    kept.cut(next(differing, min(len(tokens), len(stored.output_token_ids))))
    return kept


def _terminal_mark(stored: StoredRequest, said: _Sources, tokens: Tokens) -> Finish | None:
    """The mark of the store or of a worker whose tokens agree, the earliest one; an abort or error counts in any case, behind all tokens
    that a gateway has: a leader that had not heard of it may have gone on."""
    received_len = max((len(claim.token_ids) for claim in said.claims), default=0)
    marks = [(stored.finish, tuple(stored.output_token_ids))]
    marks += [(dropped.finish, _output_of(dropped)) for dropped in said.dropped]
    found = []
    for finish, source in marks:
        if finish is None:
            continue
        if _agree(source, tokens) and finish.output_len <= len(tokens):
            is_tokenless = finish.reason in CUT_SHORT
            found.append(replace(finish, output_len=max(finish.output_len, received_len)) if is_tokenless else finish)
        elif finish.reason in CUT_SHORT:
            found.append(replace(finish, output_len=len(tokens)))
    return min(found, key=lambda finish: finish.output_len, default=None)


def _lacks_logprobs(sampling: SamplingParams, tokens: Tokens) -> bool:
    """Whether tokens behind these, the promised ones, would come without log-probabilities that were asked for."""
    return sampling.wants_logprobs or (sampling.prompt_logprobs is not None and not tokens)


def _slot_to_adopt(stored: StoredRequest, live: list[_LiveSlot], tokens: Tokens) -> _LiveSlot | None:
    """The slot of the highest attempt, not behind the store's, whose ids agree over its computed length, as far as they are known."""
    prompt = stored.submission.prompt_token_ids
    known = np.concatenate((prompt, np.array(tokens, np.int32)))
    is_cut = _lacks_logprobs(stored.submission.sampling, tokens)
    for item in live:
        slot = item.slot
        known_len = min(slot.computed_len, len(known)) if is_cut else slot.computed_len
        if (
            slot.attempt >= stored.attempt
            and slot.prompt_len == len(prompt)
            and np.array_equal(slot.token_ids[:known_len], known[:known_len])
        ):
            return item
    return None


def _orphans(unknown: Iterable[_Sources]) -> tuple[tuple[OrphanSlot, ...], tuple[SlotToDrop, ...]]:
    """Of each unknown request one slot a worker, that of the highest attempt; the others are dropped."""
    orphans: list[OrphanSlot] = []
    drops: list[SlotToDrop] = []
    for said in unknown:
        latest = {item.worker: item for item in sorted(said.live, key=lambda item: item.slot.attempt)}
        orphans += [OrphanSlot(worker, item.slot) for worker, item in latest.items()]
        drops += [_drop(item, None) for item in said.live if latest[item.worker] is not item]
    return tuple(orphans), tuple(drops)


def _drop(item: _LiveSlot, finish: Finish | None) -> SlotToDrop:
    return SlotToDrop(item.worker, item.slot.slot, item.slot.request_id, item.slot.attempt, finish)


def _recovered_worker(worker: str, report: WorkerReport, stored: StoredState) -> RecoveredWorker:
    boot_id = report.description.boot_id
    recorded = stored.blocks.get((worker, boot_id))
    published = held_blocks(report, () if recorded is None else recorded.values())
    return RecoveredWorker(worker, boot_id, report.last_step + 1, published)


def _output_of(slot: SlotReport | DroppedSlot) -> Tokens:
    return tuple(slot.token_ids[slot.prompt_len :].tolist())


def _agree(one: Tokens, other: Tokens) -> bool:
    """Whether one of them is a beginning of the other."""
    length = min(len(one), len(other))
    return one[:length] == other[:length]
