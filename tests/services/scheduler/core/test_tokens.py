"""The tokens of a sequence read like one list, whatever lies in the prompt's array and what in the output's."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.tokens import Tokens

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=12)
BOUND = st.none() | st.integers(-15, 15)


@given(prompt=IDS, output=IDS, first=BOUND, stop=BOUND)
def test_slices_are_those_of_the_list(prompt: list[int], output: list[int], first: int | None, stop: int | None) -> None:
    tokens, both = Tokens(np.array(prompt, np.int32), output), prompt + output
    part = tokens[first:stop]
    assert part.dtype == np.int32 and part.tolist() == both[first:stop]
    assert len(tokens) == len(both) and list(tokens) == both and tokens == both


def test_single_ids_are_ints_and_what_lies_outside_is_an_error() -> None:
    tokens = Tokens(np.array([1, 2], np.int32), (3,))
    assert [tokens[0], tokens[2], tokens[-1], tokens[-3]] == [1, 3, 3, 1] and type(tokens[0]) is int
    with pytest.raises(IndexError):
        tokens[3]


def test_a_slice_of_the_prompt_is_no_copy_and_one_of_the_output_is() -> None:
    prompt = np.array([1, 2, 3], np.int32)
    tokens = Tokens(prompt, (4, 5))
    assert np.shares_memory(tokens[1:3], prompt)
    tail = tokens[2:]
    tokens.output.append(6)
    assert tail.tolist() == [3, 4, 5] and tokens[:].tolist() == [1, 2, 3, 4, 5, 6]


def test_another_output_replaces_the_one_before_behind_the_same_prompt() -> None:
    tokens = Tokens(np.array([1, 2], np.int32), (3, 4, 5))
    tokens.replace_output(np.array([1, 2, 9], np.int32))
    assert tokens == [1, 2, 9] and tokens != [1, 2, 9, 0]
