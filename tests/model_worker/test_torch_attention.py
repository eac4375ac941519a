"""How decode rows are put into groups."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from model_worker.kernels.torch_attention import GROUP_TOKENS_MAX, group_by_length


@given(st.lists(st.integers(1, 3 * GROUP_TOKENS_MAX), max_size=80))
def test_groups_hold_every_row_once_within_bounds(lens: list[int]) -> None:
    groups = group_by_length(np.array(lens, dtype=np.int32))
    assert sorted(row for group in groups for row in group) == list(range(len(lens)))
    for group in groups:
        longest, shortest = max(lens[row] for row in group), min(lens[row] for row in group)
        assert len(group) == 1 or len(group) * longest <= GROUP_TOKENS_MAX
        assert 2 * shortest >= longest


def test_rows_of_one_length_fill_their_groups() -> None:
    groups = group_by_length(np.full(20, GROUP_TOKENS_MAX // 8, dtype=np.int32))
    assert [len(group) for group in groups] == [8, 8, 4]


def test_a_short_row_is_not_padded_to_a_long_one() -> None:
    groups = group_by_length(np.array([10, 900, 11, 800], dtype=np.int32))
    assert [group.tolist() for group in groups] == [[1, 3], [2, 0]]
