"""Who takes the waiting sequences: the next one of a worker, so that the better worker with room gets each."""

from dataclasses import dataclass

from kv_manager.allocation import PrefixMatch
from services.scheduler.core.admission import positions_reserved, resume_watermark
from services.scheduler.core.forks import fork_len, is_awaited, parent_of
from services.scheduler.core.lifecycle import Lifecycle
from services.scheduler.core.prefixes_under_way import PrefixesUnderWay
from services.scheduler.core.replica import Replica
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.worker_choice import CHOICES, WorkerLoad, least_requests
from tessera.values.config import Config

NOBODY = "(nobody)"
"""No worker's name: in this line stands, until one comes, who was promised more than any worker that is known can hold."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A waiting sequence fits a worker now. `match` is good until the pool changes; `positions` is what it gets blocks for.

    `parent`: the KV of the first `num_cached_tokens` positions is this running sequence's, to fork from; else the match's.
    """

    replica: Replica
    sequence: Sequence
    match: PrefixMatch
    positions: int
    num_cached_tokens: int
    parent: Sequence | None = None


class Placer:
    """Chooses a worker when a sequence has come to the head of the queue, by the configured `worker_choice`.

    A worker that puts its batch together takes what is its own, and sends those it meets on the way into the lines of the workers
    that are better for them. So nobody waits for a worker without room, or long for one that is busy, and no worker idles meanwhile.
    """

    def __init__(self, config: Config, lifecycle: Lifecycle) -> None:
        self._choose = CHOICES[config.worker_choice]
        self._book = lifecycle.book
        self._fleet = lifecycle.fleet
        self._suspects = lifecycle.suspects
        self._waiting = lifecycle.waiting
        self._turn = 0
        self._under_way: PrefixesUnderWay | None = None  # on the worker whose batch is put together, once somebody asks
        self._shared_blocks: dict[bytes, int] = {}  # of who is waited for: so many have to be published

    def begin_batch(self) -> None:
        """A worker's next batch is being put together."""
        self._under_way = None

    def next_for(self, replica: Replica, now_us: int) -> Placement | None:
        """What `replica` admits next; None where nobody who waits for it fits."""
        if replica.is_leaving:
            return None
        waiting = self._waiting
        self._bring_back()
        quick = self._quick(replica, now_us)
        while (sequence := waiting.first_for(replica.name)) is not None:
            in_line = waiting.stands_in_line(sequence)
            parent = parent_of(self._book, sequence)
            if parent is not None and not in_line and is_awaited(parent):
                waiting.set_aside(sequence, parent.request_id)
                continue
            placement = (self._fit(replica, sequence) if in_line else None) or self._place(sequence, quick)
            if placement is None and (in_line or replica.can_hold(sequence)):
                return None
            if placement is not None and placement.replica is replica:
                if not in_line and self._waits_for_prefix(placement):
                    continue
                return placement
            if in_line:  # what was kept free here is gone: those behind it choose anew as well
                waiting.dissolve(replica.name)
            if placement is None:
                waiting.send(sequence, self._holder_of(sequence), 0)
            else:
                num_blocks = placement.replica.manager.blocks_spanned(placement.positions)
                waiting.send(sequence, placement.replica.name, num_blocks)
        return None

    def _bring_back(self) -> None:
        """Who waits for the prompt of a request that has computed it, or the part that is wanted, or does not get to it soon, waits for its
        turn again."""
        for request_id in self._waiting.awaited:
            parent, num_blocks = self._book.get(request_id), self._shared_blocks.get(request_id)
            if (
                parent is None
                or not is_awaited(parent)
                or (num_blocks is not None and parent.table.num_published >= num_blocks)
            ):
                self._shared_blocks.pop(request_id, None)
                self._waiting.bring_back(request_id)

    def _waits_for_prefix(self, placement: Placement) -> bool:
        """Set a sequence aside that would compute again what another computes now on the same worker. Else it counts as computing its own."""
        replica, sequence, num_cached = placement.replica, placement.sequence, len(placement.match.block_ids)
        if placement.parent is not None or not sequence.table.digests:
            return False
        if self._under_way is None:
            self._under_way = PrefixesUnderWay(replica.running.values())
        shared = self._under_way.shared_with(sequence, num_cached, replica.manager.block_size)
        if shared is None:
            self._under_way.note(sequence, num_cached)
            return False
        owner_id = shared.owner.request_id
        self._shared_blocks[owner_id] = min(shared.num_blocks, self._shared_blocks.get(owner_id, shared.num_blocks))
        self._waiting.set_aside(sequence, owner_id)
        return True

    def _quick(self, replica: Replica, now_us: int) -> list[Replica]:
        """Those who take a request soon: `replica` now, others in their next step. Nobody stands in the line of one that is slow."""
        quick = []
        for other in self._fleet:
            if not other.takes_requests:
                continue
            if other is replica or not other.is_slow(now_us):
                quick.append(other)
            else:
                self._waiting.dissolve(other.name)
        return quick

    def _place(self, sequence: Sequence, among: list[Replica]) -> Placement | None:
        """The best of these workers that a sequence fits now."""
        replicas = [replica for replica in among if self._has_seat(replica, sequence)]
        home = next((replica for replica in replicas if self._parent_on(replica, sequence) is not None), None)
        placement = self._fit(home, sequence) if home is not None else None
        if placement is not None and placement.parent is not None:
            self._turn += 1
            return placement
        while replicas:
            placement = self._fit(replicas.pop(self._best(replicas, sequence)), sequence)
            if placement is not None:
                self._turn += 1
                return placement
        return None

    def _best(self, replicas: list[Replica], sequence: Sequence) -> int:
        """Index of the best of these workers."""
        if len(replicas) == 1:
            return 0
        loads = []
        for replica in replicas:
            num_in_line, num_kept = self._waiting.ahead_of(sequence, replica.name)
            num_tokens = replica.num_held_tokens + num_kept * replica.manager.block_size
            cached_len = replica.manager.likely_cached_len(sequence.table, sequence.hit_token_ids)
            loads.append(WorkerLoad(len(replica.running) + num_in_line, num_tokens, cached_len))
        choose = least_requests if sequence.request_id in self._suspects.strong else self._choose
        return choose(loads, self._turn)

    def _has_seat(self, replica: Replica, sequence: Sequence) -> bool:
        return replica.can_hold(sequence) and replica.seats_left > self._waiting.ahead_of(sequence, replica.name)[0]

    def _fit(self, replica: Replica, sequence: Sequence) -> Placement | None:
        """A sequence on a worker, where that has a seat and blocks for all its tokens beside those kept for who is ahead in its line."""
        if not self._has_seat(replica, sequence):
            return None
        manager = replica.manager
        num_ahead, num_kept = self._waiting.ahead_of(sequence, replica.name)
        if sequence.attempt > 0 and (replica.running or num_ahead):
            num_kept += resume_watermark(manager.num_blocks)
        positions = positions_reserved(sequence.ledger.num_tokens, sequence.tokens_max)
        match = manager.match(sequence.table, sequence.hit_token_ids)
        start, needed = match.num_cached_tokens, manager.blocks_needed(match, positions)
        parent = self._parent_on(replica, sequence)
        shared_len = fork_len(parent, sequence) if parent is not None else 0
        if parent is not None and shared_len > start:
            start = shared_len
            needed = manager.blocks_spanned(positions) - manager.num_shared_by_fork(parent.table, shared_len)
        else:
            parent = None
        fits = needed + num_kept <= manager.num_free_blocks
        return Placement(replica, sequence, match, positions, start, parent) if fits else None

    def _parent_on(self, replica: Replica, sequence: Sequence) -> Sequence | None:
        """Whom a sequence can fork from on a worker. What comes back to the pool with the next batch cannot be copied by it."""
        parent = parent_of(self._book, sequence)
        is_there = parent is not None and parent.worker == replica.name and not replica.is_swapping_in(parent)
        return parent if is_there else None

    def _holder_of(self, sequence: Sequence) -> str:
        """Of the workers whose pool holds a sequence to its end one that can compute, or one that is away where all of them are; NOBODY
        where there is none at all."""
        holders = [replica for replica in self._fleet if replica.can_hold(sequence)]
        best = min(holders, key=lambda replica: (not replica.takes_requests, len(replica.running)), default=None)
        return NOBODY if best is None else best.name
