"""The load of all workers together, as gateways are told it: read now and then, never in a step."""

from collections import deque
from collections.abc import Callable
from itertools import islice

from services.scheduler.core.lifecycle import Lifecycle
from services.scheduler.core.load import Load
from services.scheduler.core.replica import Replica
from tessera.values.load import GroupLoad, WorkerLoad, WorkerState

RATE_WINDOW_US = 5_000_000
"""Tokens per second are told over so long: shorter, and a reading depends on whether a step has just ended."""

LOOKED_UP_REQUESTS_MAX = 32
LOOKED_UP_TOKENS_MAX = 8192
"""Of the queue so much is looked up in the prefix cache at most. Hashing the tokens takes below half a millisecond, and is not done again
when the request is admitted."""


class LoadMeter:
    """Reads the load of one scheduler. `load` is that as its own process sees it."""

    def __init__(self, lifecycle: Lifecycle, load: Callable[[], Load]) -> None:
        self._lifecycle = lifecycle
        self._load = load
        self._sampled: deque[tuple[int, int]] = deque()  # (time, tokens sampled until then), oldest first

    def read(self, now_us: int) -> GroupLoad:
        """The load at this moment. The rate is that since an earlier reading, of RATE_WINDOW_US ago where there is one."""
        load, attached = self._load(), self._lifecycle.fleet.attached
        workers = [_worker_load(replica) for replica in self._lifecycle.fleet]
        cache = load.prefix_cache
        return GroupLoad(
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_swapped=load.num_swapped,
            used_kv_tokens=sum(worker.used_kv_tokens for worker in workers),
            total_kv_tokens=sum(worker.total_kv_tokens for worker in workers),
            prefix_hit_rate=cache.hit_tokens / cache.query_tokens if cache.query_tokens else 0.0,
            generation_tokens_per_s=self._rate(now_us, load.num_sampled_tokens),
            num_waiting_uncached_tokens=load.num_queued_tokens - self._num_waiting_cached(attached),
            max_running=sum(replica.running_max for replica in attached),
            workers=tuple(sorted(workers, key=lambda worker: worker.address)),
        )

    def _rate(self, now_us: int, num_sampled: int) -> float:
        sampled = self._sampled
        sampled.append((now_us, num_sampled))
        while len(sampled) > 2 and now_us - sampled[1][0] >= RATE_WINDOW_US:
            sampled.popleft()
        since_us, before = sampled[0]
        return 1e6 * (num_sampled - before) / (now_us - since_us) if now_us > since_us else 0.0

    def _num_waiting_cached(self, attached: list[Replica]) -> int:
        """Tokens of the queue that some worker has cached, of the first so many requests."""
        num_cached = num_looked_up = 0
        for sequence in islice(self._lifecycle.waiting, LOOKED_UP_REQUESTS_MAX if attached else 0):
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
