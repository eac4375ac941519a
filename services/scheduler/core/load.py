"""How much a scheduler has to do, how much room there is, and what has become of its requests: what dashboards and logs show."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kv_manager.prefix_cache_stats import PrefixCacheStats
from services.scheduler.core.lifecycle import Lifecycle


@dataclass(slots=True)
class Totals:
    """Counted since this scheduler began, and never less than before."""

    num_submitted: int = 0  # requests taken in as new, recovered ones not among them
    num_sampled_tokens: int = 0  # told by workers, those behind a late stop and of requests that had moved on too
    num_contradictions: int = 0  # outputs told by a worker, gateway or the store that others contradict


@dataclass(frozen=True, slots=True)
class Load:
    """Present counts, then totals since the start."""

    num_running: int
    num_swapped: int
    num_waiting: int
    num_finished: int  # ended, and still readable
    num_queued_tokens: int  # of those that wait
    num_batches_in_flight: int
    num_free_blocks: int  # over all workers; blocks that only the prefix cache holds are free
    num_blocks: int
    num_preemptions: int
    num_swap_outs: int  # of these, whose KV went to host memory
    recomputed_positions: int  # a takeover lost their KV though a reachable worker held it
    num_contradictions: int
    num_submitted: int = 0
    num_sampled_tokens: int = 0
    num_ended: Mapping[str, int] = field(default_factory=dict)  # requests, by the value of the `FinishReason` that stands
    num_output_tokens: int = 0  # of those that ended
    prefix_cache: PrefixCacheStats = field(default_factory=PrefixCacheStats)  # over all workers that are there

    @classmethod
    def of(
        cls, lifecycle: Lifecycle, totals: Totals, recomputed_positions: int, num_preemptions: int, num_swap_outs: int
    ) -> "Load":
        """The load of a scheduler."""
        book, replicas = lifecycle.book, list(lifecycle.fleet)
        num_running = sum(len(replica.running) for replica in replicas)
        return cls(
            num_running=num_running,
            num_swapped=book.num_unfinished - num_running - len(lifecycle.waiting),
            num_waiting=len(lifecycle.waiting),
            num_finished=book.num_finished,
            num_queued_tokens=lifecycle.waiting.num_tokens,
            num_batches_in_flight=sum(len(replica.in_flight) for replica in replicas),
            num_free_blocks=sum(replica.manager.num_free_blocks for replica in replicas),
            num_blocks=sum(replica.manager.num_blocks for replica in replicas),
            num_preemptions=num_preemptions,
            num_swap_outs=num_swap_outs,
            recomputed_positions=recomputed_positions,
            num_contradictions=totals.num_contradictions,
            num_submitted=totals.num_submitted,
            num_sampled_tokens=totals.num_sampled_tokens,
            num_ended={reason.value: count for reason, count in book.num_ended.items() if count},
            num_output_tokens=book.num_output_tokens,
            prefix_cache=_sum([replica.manager.stats for replica in replicas]),
        )


def _sum(stats: list[PrefixCacheStats]) -> PrefixCacheStats:
    return PrefixCacheStats(
        query_requests=sum(one.query_requests for one in stats),
        hit_requests=sum(one.hit_requests for one in stats),
        query_tokens=sum(one.query_tokens for one in stats),
        hit_tokens=sum(one.hit_tokens for one in stats),
        resume_cached_tokens=sum(one.resume_cached_tokens for one in stats),
    )
