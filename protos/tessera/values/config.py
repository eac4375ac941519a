"""Scheduling configuration: ATOM's names and defaults, validated once."""

from collections.abc import Mapping
from dataclasses import dataclass

WORKER_CHOICES = ("prefix_aware", "least_requests", "least_tokens", "round_robin")
"""How a worker is chosen for a request: by cached prefix and load, by load alone, or in turn."""


class ConfigError(ValueError):
    """A configuration value that cannot work; the message names the field, the value and the fix."""


def check_minimums(config: object, minimums: Mapping[str, float]) -> None:
    """Raise ConfigError for the first of these fields of `config` that is below its minimum; None is no value."""
    for name, minimum in minimums.items():
        value = getattr(config, name)
        if value is not None and value < minimum:
            raise ConfigError(f"{name} must be at least {minimum}, got {value}")


@dataclass(frozen=True, slots=True)
class Config:
    """How one scheduler batches and bounds its work. Block size and pool size come from the worker, not from here."""

    max_num_seqs: int = 512  # sequences in one batch
    max_num_batched_tokens: int = 16384  # positions computed in one step
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True  # off: a prompt is computed whole, in one step
    long_prefill_token_threshold: int = 0  # most tokens of one prompt per step; 0 is no cap
    max_batches_in_flight: int = 2  # 2: the next batch leaves before the last output is known
    worker_choice: str = "prefix_aware"  # who of several workers takes a request, one of WORKER_CHOICES
    max_queued_requests: int = 4096
    max_queued_tokens: int = 4_194_304
    journal_wait_ms: int = 200  # without an acknowledgement for this long, frames leave undurable
    journal_backlog_max: int = 4096  # records kept for the store; beyond it one full rewrite is owed
    gateway_grace_ms: int = 30_000  # how long requests of a lost session live
    result_retention_ms: int = 60_000  # how long a finished request can still be read

    def __post_init__(self) -> None:
        minimums = {
            "max_num_seqs": 1,
            "max_num_batched_tokens": 1,
            "long_prefill_token_threshold": 0,
            "max_queued_requests": 1,
            "max_queued_tokens": 1,
            "journal_wait_ms": 1,
            "journal_backlog_max": 1,
            "gateway_grace_ms": 0,
            "result_retention_ms": 0,
        }
        check_minimums(self, minimums)
        if self.worker_choice not in WORKER_CHOICES:
            raise ConfigError(f"worker_choice must be one of {', '.join(WORKER_CHOICES)}, got {self.worker_choice!r}")
        if self.max_batches_in_flight not in (1, 2):
            raise ConfigError(f"max_batches_in_flight must be 1 or 2, got {self.max_batches_in_flight}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running sequence needs its token in a step"
            )
