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
            r"max_num_batched_tokens \(64\) must be at least max_num_seqs \(65\)",
        ),
    ],
)
def test_numbers_of_a_batch_that_cannot_work_are_named(changes: dict, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Config(**changes)
