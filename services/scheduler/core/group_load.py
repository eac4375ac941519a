"""The load of all workers together, as gateways are told it: read now and then, never in a step."""

from collections import deque

from services.scheduler.core.lifecycle import Lifecycle
from services.scheduler.core.load import Totals
from services.scheduler.core.replica import Replica
from tessera.values.load import GroupLoad, WorkerLoad, WorkerState

RATE_WINDOW_US = 5_000_000
"""Tokens per second are told over so long: shorter, and a reading depends on whether a step has just ended."""

LOOKED_UP_REQUESTS_MAX = 32
LOOKED_UP_TOKENS_MAX = 8192
"""Of the queue so much is looked up in the prefix cache at most. Hashing the tokens takes below half a millisecond, and is not done again
when the request is admitted."""


class LoadMeter:
    """Reads the load of one scheduler."""

    def __init__(self, lifecycle: Lifecycle, totals: Totals) -> None:
        self._lifecycle = lifecycle
        self._totals = totals
        self._sampled: deque[tuple[int, int]] = deque()  # (time, tokens sampled until then), oldest first

    def read(self, now_us: int) -> GroupLoad:
        """The load at this moment. The rate is that since an earlier reading, of RATE_WINDOW_US ago where there is one."""
        waiting = self._lifecycle.waiting
        attached = self._lifecycle.fleet.attached
        workers = [_worker_load(replica) for replica in self._lifecycle.fleet]
        num_running = sum(worker.num_running for worker in workers)
        queries = sum(replica.manager.stats.query_tokens for replica in self._lifecycle.fleet)
        hits = sum(replica.manager.stats.hit_tokens for replica in self._lifecycle.fleet)
        return GroupLoad(
            num_running=num_running,
            num_waiting=len(waiting),
            num_swapped=self._lifecycle.book.num_unfinished - num_running - len(waiting),
            used_kv_tokens=sum(worker.used_kv_tokens for worker in workers),
            total_kv_tokens=sum(worker.total_kv_tokens for worker in workers),
            prefix_hit_rate=hits / queries if queries else 0.0,
            generation_tokens_per_s=self._rate(now_us),
            num_waiting_uncached_tokens=waiting.num_tokens - self._num_waiting_cached(attached),
            max_running=sum(replica.running_max for replica in attached),
            workers=tuple(sorted(workers, key=lambda worker: worker.address)),
        )

    def _rate(self, now_us: int) -> float:
        sampled = self._sampled
        sampled.append((now_us, self._totals.num_sampled_tokens))
        while len(sampled) > 2 and now_us - sampled[1][0] >= RATE_WINDOW_US:
            sampled.popleft()
        since_us, before = sampled[0]
        return 1e6 * (self._totals.num_sampled_tokens - before) / (now_us - since_us) if now_us > since_us else 0.0

    def _num_waiting_cached(self, attached: list[Replica]) -> int:
        """Tokens of the queue that some worker has cached, of the first so many requests."""
        num_cached = num_looked_up = 0
        for count, sequence in enumerate(self._lifecycle.waiting):
            if count == LOOKED_UP_REQUESTS_MAX or not attached:
                break
            token_ids = sequence.hit_token_ids
            if not sequence.table.digests:
                num_looked_up += len(token_ids)
                if num_looked_up > LOOKED_UP_TOKENS_MAX:
                    break
            num_cached += max(replica.manager.likely_cached_len(sequence.table, token_ids) for replica in attached)
        return num_cached


def _state(replica: Replica) -> WorkerState:
    if replica.is_ending:
        return WorkerState.LEAVING
    if not replica.is_drained:
        return WorkerState.SERVING
    return WorkerState.DRAINING if replica.num_requests or replica.in_flight else WorkerState.DRAINED


def _worker_load(replica: Replica) -> WorkerLoad:
    if not replica.is_attached:
        return WorkerLoad(replica.name, WorkerState.AWAY)
    return WorkerLoad(
        replica.name,
        _state(replica),
        len(replica.running),
        len(replica.swapped),
        replica.num_held_tokens,
        replica.manager.num_blocks * replica.manager.block_size,
    )
