"""What a GPU has left for KV: utilisation of the total, less all that the model takes, the least over the ranks, explained."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_worker.gpu_memory import MIB, GPUMemory, NoMemoryForKV, kv_budget
from tessera.values.config import ConfigError

GIB = 1024 * MIB
CARD = GPUMemory(
    total=80 * GIB, weights=30 * GIB, activations=4 * GIB, communication=256 * MIB, graphs=768 * MIB, others=1 * GIB
)


def test_the_rest_of_the_utilisation_is_for_kv() -> None:
    budget = kv_budget([CARD], 0.9)
    assert budget.kv_bytes == (72 - 1 - 30 - 4 - 1) * GIB
    assert budget.explanation == (
        "rank 0: 0.9 of 81920 MiB, less other processes 1024 MiB, weights 30720 MiB, activations 4096 MiB, "
        "communication 256 MiB, graphs 768 MiB, is 36864 MiB",
        "every rank gives its KV pool 36864 MiB, the least of 1: that of rank 0",
    )


def test_the_rank_with_the_least_decides() -> None:
    budget = kv_budget([CARD, replace(CARD, activations=6 * GIB), replace(CARD, others=2 * GIB)], 0.9)
    assert budget.kv_bytes == 34 * GIB
    assert budget.explanation[-1] == "every rank gives its KV pool 34816 MiB, the least of 3: that of rank 1"
    assert len(budget.explanation) == 4


def test_no_room_is_refused_with_the_numbers_of_the_rank() -> None:
    with pytest.raises(
        NoMemoryForKV, match=r"rank 1: 0.9 of 81920 MiB, less .*weights 71680 MiB.*is -4096 MiB; raise gpu_memory_"
    ):
        kv_budget([CARD, replace(CARD, weights=70 * GIB)], 0.9)


@pytest.mark.parametrize("utilization", [0.0, -0.5, 1.01, float("nan")])
def test_a_utilisation_that_cannot_be_is_refused(utilization: float) -> None:
    with pytest.raises(ConfigError, match="gpu_memory_utilization must be above 0 and at most 1"):
        kv_budget([CARD], utilization)


@given(
    st.lists(st.tuples(*[st.integers(0, 10 * GIB)] * 5), min_size=1, max_size=8),
    st.floats(0.01, 1.0),
)
def test_no_rank_is_overdrawn_and_one_is_used_up(parts: list[tuple[int, ...]], utilization: float) -> None:
    ranks = [GPUMemory(80 * GIB, *each) for each in parts]
    allowed = int(80 * GIB * utilization)
    try:
        budget = kv_budget(ranks, utilization)
    except NoMemoryForKV:
        assert any(sum(each) >= allowed for each in parts)
        return
    used = [sum(each) + budget.kv_bytes for each in parts]
    assert max(used) == allowed
