"""Prompt lookup proposes what followed the longest recent repetition, and nothing where there is none."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_worker.sampling_table import SamplingTable
from model_worker.slot_table import SlotTable
from model_worker.speculation.ngram import NgramProposer, continuation
from tessera.values.batch import SlotEntry
from tessera.values.model import KVGeometry
from tessera.values.sampling import SamplingParams

IDS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def proposed(ids: list[int], count: int, min_n: int = 2, max_n: int = 4) -> list[int]:
    return continuation(np.array(ids, np.int32), count, min_n, max_n).tolist()


def by_definition(ids: list[int], count: int, min_n: int, max_n: int) -> list[int]:
    """The rule, position by position."""
    for n in range(max_n, min_n - 1, -1):
        for end in range(len(ids) - 1, n - 1, -1):
            if ids[end - n : end] == ids[len(ids) - n :]:
                longer = ids[:]
                for _ in range(count):
                    longer.append(longer[end + len(longer) - len(ids)])
                return longer[len(ids) :]
    return []


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        pytest.param([1, 2, 3, 4, 5, 6, 1, 2, 3], [4, 5, 6], id="what followed"),
        pytest.param([1, 2, 7, 7, 1, 2, 8, 8, 1, 2], [8, 8, 1], id="the last occurrence"),
        pytest.param([1, 2, 3, 7, 7, 9, 2, 3, 8, 8, 1, 2, 3], [7, 7, 9], id="a longer match before a later one"),
        pytest.param(
            [5, 1, 2, 3, 4, 9, 6, 1, 2, 3, 4, 8, 8, 5, 1, 2, 3, 4], [8, 8, 5], id="no more than max_n tokens are compared"
        ),
        pytest.param([9, 9, 9], [9, 9, 9], id="a run goes on"),
        pytest.param([1, 2, 1, 2], [1, 2, 1], id="a period goes on"),
        pytest.param([3, 1, 4, 5, 2, 4], [], id="one token is too little"),
        pytest.param([1, 2, 3], [], id="nothing came before"),
        pytest.param([4], [], id="a single token"),
    ],
)
def test_what_is_proposed(ids: list[int], expected: list[int]) -> None:
    assert proposed(ids, 3) == expected


@given(ids=IDS, count=st.integers(1, 6), min_n=st.integers(1, 3), more=st.integers(0, 3))
def test_it_is_the_rule_position_by_position(ids: list[int], count: int, min_n: int, more: int) -> None:
    assert proposed(ids, count, min_n, min_n + more) == by_definition(ids, count, min_n, min_n + more)


def test_every_row_has_drafts_of_its_own_ids_up_to_its_room() -> None:
    table = SlotTable(4, 64, KVGeometry(8, 4, 8, "test"))
    for slot, ids in ((0, [1, 2, 3, 4, 1, 2]), (2, [1, 2, 3]), (3, [6, 7, 8, 6, 7])):
        prompt = np.array(ids, np.int32)
        table.enter(SlotEntry(slot, bytes([slot]) * 16, 1, len(ids), prompt, np.zeros(0, np.int32), 0, SamplingParams(seed=0)))
    table.place_drafts(np.array([2]), np.array([2]), np.array([1, 2], np.int32))
    drafts = NgramProposer(2, 4).propose(np.array([3, 2, 0]), np.array([1, 3, 2]), table, SamplingTable(4, 50))
    assert drafts.counts.tolist() == [1, 0, 2], "what was drafted before is no id"
    assert drafts.token_ids[:, :2].tolist() == [[8, -1], [-1, -1], [3, 4]]
    assert (drafts.token_ids[:, 2] == -1).all()
