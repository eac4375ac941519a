"""Scheduling configuration: ATOM's names and defaults, validated once."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

WORKER_CHOICES = ("prefix_aware", "least_requests", "least_tokens", "round_robin")
"""How a worker is chosen for a request: by cached prefix and load, by load alone, or in turn."""

POLICIES = ("mixed", "prefill_first")
"""What a step computes: the next token of every running request and prefills beside them, or (ATOM) prefills alone as long as there are any."""

PREFIX_INDEXES = ("hash", "radix")
"""How cached prefixes are found: by a chain of digests, or by a tree of their tokens. Both find the same."""

QUEUE_ORDERS = ("fcfs", "priority")
"""Who goes first of those that wait: the first to come, or the lowest priority number and of these the first to come."""

PREEMPTION_MODES = ("recompute", "swap")
"""What becomes of the KV of a sequence that has to make room: given up and computed again, or kept in the worker's host memory."""

PREEMPTION_POLICIES = ("fcfs", "priority", "shortest_remaining", "recompute")
"""Who has to make room: the latest admitted, the largest priority number, the longest remaining, or the largest cached prefix."""


class ConfigError(ValueError):
    """A configuration value that cannot work; the message names the field, the value and the fix."""


NUMBER_MAX = 2**31 - 1
"""No count, and no time in milliseconds, makes sense beyond; timers and protobuf fields take no more."""

BYTES_MAX = 2**46
"""64 TiB: what a process can address."""


def check_minimums(config: object, minimums: Mapping[str, float]) -> None:
    """Raise ConfigError for the first of these fields of `config` that is no number, below its minimum or above `NUMBER_MAX`; None is no
    value."""
    for name, minimum in minimums.items():
        value = getattr(config, name)
        if value is None:
            continue
        if not value >= minimum:  # nor is NaN
            raise ConfigError(f"{name} must be at least {minimum}, got {value}")
        maximum = BYTES_MAX if name.endswith("_bytes") else NUMBER_MAX
        if value > maximum:
            raise ConfigError(f"{name} must be at most {maximum}, got {value}")


def check_choices(config: object, choices: Mapping[str, tuple[str, ...]]) -> None:
    """Raise ConfigError for the first of these fields of `config` that is none of its choices."""
    for name, allowed in choices.items():
        value = getattr(config, name)
        if value not in allowed:
            raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


@dataclass(frozen=True, slots=True)
class Config:
    """How one scheduler batches and bounds its work. Block size and pool size come from the worker, not from here."""

    max_num_seqs: int = 512  # sequences in one batch
    max_num_batched_tokens: int = 16384  # positions computed in one step
    enable_prefix_caching: bool = True
    prefix_index: str = "hash"  # how cached prefixes are found, one of PREFIX_INDEXES
    secure_zero: bool = False  # a block is zeroed before a request of another cache salt gets it
    enable_chunked_prefill: bool = True  # off: a prompt is computed whole, in one step
    long_prefill_token_threshold: int = 0  # most tokens of one prompt per step, where prompts are chunked; 0 is no cap
    policy: str = "mixed"  # one of POLICIES
    scheduler_delay_factor: float = 0.0  # new requests wait until the oldest has waited for so many prefill steps; 0 is off
    itl_target_ms: int = 100  # a prompt shares a step with earlier answers only as far as it is to take no longer; 0 is no cap
    num_speculative_tokens: int = 0  # most draft tokens (k) of one sequence per step: a decode computes up to 1 + k positions
    max_batches_in_flight: int = 2  # 2: the next batch leaves before the last output is known
    lockstep: bool = False  # the workers are one group (expert parallelism): a step goes to all, idle ones compute a dummy run
    queue_order: str = "fcfs"  # who goes first of those that wait, one of QUEUE_ORDERS
    preemption_mode: str = "recompute"  # one of PREEMPTION_MODES
    preemption_policy: str = "fcfs"  # who has to make room, one of PREEMPTION_POLICIES
    worker_choice: str = "prefix_aware"  # who of several workers takes a request, one of WORKER_CHOICES
    max_queued_requests: int = 4096
    max_queued_tokens: int = 4_194_304
    journal_wait_ms: int = 200  # without an acknowledgement for this long, frames leave undurable
    journal_backlog_max: int = 4096  # records kept for the store; beyond it one full rewrite is owed
    gateway_grace_ms: int = 30_000  # how long requests of a lost session live
    result_retention_ms: int = 60_000  # how long a finished request can still be read
    capacity_wait_ms: int = (
        300_000  # how long a request waits for a worker that holds it, while only smaller ones are there; 0: for ever
    )

    def __post_init__(self) -> None:
        minimums = {
            "max_num_seqs": 1,
            "max_num_batched_tokens": 1,
            "long_prefill_token_threshold": 0,
            "itl_target_ms": 0,
            "num_speculative_tokens": 0,
            "max_queued_requests": 1,
            "max_queued_tokens": 1,
            "journal_wait_ms": 1,
            "journal_backlog_max": 1,
            "gateway_grace_ms": 0,
            "result_retention_ms": 0,
            "capacity_wait_ms": 0,
        }
        check_minimums(self, minimums)
        choices = {
            "worker_choice": WORKER_CHOICES,
            "policy": POLICIES,
            "prefix_index": PREFIX_INDEXES,
            "queue_order": QUEUE_ORDERS,
            "preemption_mode": PREEMPTION_MODES,
            "preemption_policy": PREEMPTION_POLICIES,
        }
        check_choices(self, choices)
        if not (math.isfinite(self.scheduler_delay_factor) and self.scheduler_delay_factor >= 0):
            raise ConfigError(f"scheduler_delay_factor must be a number of at least 0, got {self.scheduler_delay_factor}")
        if self.max_batches_in_flight not in (1, 2):
            raise ConfigError(f"max_batches_in_flight must be 1 or 2, got {self.max_batches_in_flight}")
        row_len = 1 + self.num_speculative_tokens
        if self.max_num_batched_tokens < self.max_num_seqs * row_len:
            times = f" times 1 + num_speculative_tokens ({row_len})" if self.num_speculative_tokens else ""
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs ({self.max_num_seqs}){times}: every running sequence needs its positions in a step"
            )
