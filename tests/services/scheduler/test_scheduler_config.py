"""What a scheduler refuses to start with."""

import pytest

from services.scheduler.config import SchedulerConfig
from tessera.values.config import Config, ConfigError


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"workers": ()}, "workers must name at least one"),
        ({"workers": ("worker:1", "worker:1")}, "workers names an address twice"),
        ({"workers": ("worker",)}, "workers must be HOST:PORT"),
        ({"redis_url": "localhost:6379"}, "redis_url must begin with"),
        ({"group": "a{b}"}, "group must be a name"),
        ({"worker_silence_ms": 0}, "worker_silence_ms must be at least 1, got 0"),
        ({"hello_wait_ms": -1}, "hello_wait_ms must be at least 0"),
        ({"lease_ms": 99}, "lease_ms must be at least 100, got 99"),
    ],
)
def test_what_cannot_work_is_named(changes: dict, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        SchedulerConfig(**{"workers": ("worker:1",), "redis_url": "unix:///redis.sock"} | changes)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
        ({"gateway_grace_ms": -1}, "gateway_grace_ms must be at least 0"),
        ({"max_batches_in_flight": 3}, "must be 1 or 2, got 3"),
        ({"worker_choice": "best"}, "worker_choice must be one of prefix_aware, .* got 'best'"),
        (
            {"max_num_seqs": 65, "max_num_batched_tokens": 64},
            r"max_num_batched_tokens \(64\) must be at least max_num_seqs \(65\): every",
        ),
        (
            {"max_num_seqs": 16, "max_num_batched_tokens": 63, "num_speculative_tokens": 3},
            r"max_num_batched_tokens \(63\) must be at least max_num_seqs \(16\) times 1 \+ num_speculative_tokens \(4\)",
        ),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens must be at least 0, got -1"),
        ({"policy": "decode_first"}, "policy must be one of mixed, prefill_first, got 'decode_first'"),
        ({"queue_order": "lifo"}, "queue_order must be one of fcfs, priority, got 'lifo'"),
        ({"preemption_mode": "wait"}, "preemption_mode must be one of recompute, swap, got 'wait'"),
        ({"preemption_policy": "oldest"}, "preemption_policy must be one of fcfs, .*, recompute, got 'oldest'"),
        ({"scheduler_delay_factor": -0.5}, "scheduler_delay_factor must be a number of at least 0, got -0.5"),
        ({"scheduler_delay_factor": float("nan")}, "scheduler_delay_factor must be a number of at least 0, got nan"),
        ({"itl_target_ms": -1}, "itl_target_ms must be at least 0, got -1"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold must be at least 0, got -1"),
    ],
)
def test_numbers_of_a_batch_that_cannot_work_are_named(changes: dict, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Config(**changes)


def test_a_budget_that_just_holds_every_decode_is_taken() -> None:
    config = Config(max_num_seqs=16, max_num_batched_tokens=64, num_speculative_tokens=3)
    assert config.max_num_batched_tokens == 64
