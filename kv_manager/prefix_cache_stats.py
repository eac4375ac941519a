"""What the prefix cache was asked and what it had."""

from dataclasses import dataclass


@dataclass(slots=True)
class PrefixCacheStats:
    """Since the start, at first admissions: requests and tokens looked up, requests with any hit, and tokens found.

    `resume_cached_tokens` are those found when a preempted or swapped sequence came back: its own work, so no hits. A sequence that
    forks from another looks nothing up.
    """

    query_requests: int = 0
    hit_requests: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    resume_cached_tokens: int = 0

    def count(self, num_tokens: int, num_cached_tokens: int, resumed: bool) -> None:
        """A sequence of `num_tokens` tokens was admitted with so many of them cached."""
        if resumed:
            self.resume_cached_tokens += num_cached_tokens
            return
        self.query_requests += 1
        self.hit_requests += num_cached_tokens > 0
        self.query_tokens += num_tokens
        self.hit_tokens += num_cached_tokens
