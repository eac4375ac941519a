"""Log-probabilities kept beside growing and shrinking outputs: each token's own, or none, whatever is put, cut and read."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.kept_logprobs import KeptLogprobs
from tessera.values.logprobs import Logprobs, joined_columns, joined_logprobs, no_logprobs


def one(value: int) -> Logprobs:
    """Those of one token: `value % 4` entries, all told by the value."""
    count = value % 4
    ids = np.arange(value, value + count, dtype=np.int32)
    return Logprobs(np.array([count], np.int32), ids, (-ids / 8).astype(np.float32), np.array([value * bool(count)], np.int32))


def many(values: list[int | None]) -> Logprobs:
    return joined_logprobs([no_logprobs(0), *(no_logprobs(1) if value is None else one(value) for value in values)])


VALUES = st.lists(st.integers(0, 50), max_size=5)
CHANGES = st.lists(st.one_of(st.tuples(st.integers(0, 8), VALUES), st.integers(0, 8)), max_size=12)


@given(CHANGES, st.integers(0, 12), st.integers(0, 12))
def test_what_is_read_is_what_was_put_last_and_none_where_nothing_was(
    changes: list[tuple[int, list[int]] | int], first: int, count: int
) -> None:
    kept, model = KeptLogprobs(), list[int | None]()
    for change in changes:
        if isinstance(change, int):
            kept.cut(change)
            del model[change:]
        else:
            at, values = change
            before = kept.copy()
            kept.put(at, many([*values]))
            model = [*model[:at], *[None] * (at - len(model)), *values]
            assert before == before.copy(), "a copy does not change with what it is of"
    expected = (model + [None] * 30)[first : first + count]
    assert kept.read(first, first + count) == many(expected)
    assert len(kept) == len(model)
    assert kept.num_entries == sum(value % 4 for value in model if value is not None)


@given(st.lists(VALUES, max_size=6))
def test_parts_of_many_are_what_they_were_joined_of(parts: list[list[int]]) -> None:
    whole = many([value for part in parts for value in part])
    assert whole.split([len(part) for part in parts]) == [many([*part]) for part in parts]
    first, end = len(parts[0]) if parts else 0, sum(map(len, parts[:3]))
    assert whole.between(first, max(first, end)) == many([value for part in parts[1:3] for value in part])


@given(
    st.integers(1, 4).flatmap(
        lambda rows: st.lists(
            st.one_of(st.none(), st.lists(st.integers(0, 50), min_size=rows, max_size=rows)), min_size=1, max_size=4
        )
    )
)
def test_tokens_that_came_step_by_step_are_told_row_by_row(steps: list[list[int] | None]) -> None:
    rows = next((len(step) for step in steps if step is not None), 1)
    columns = [None if step is None else many([*step]) for step in steps]
    found = joined_columns(columns, rows, slice(0, rows))
    if all(step is None for step in steps):
        assert found is None
        return
    assert found == many([None if step is None else step[row] for row in range(rows) for step in steps])
    assert joined_columns(columns, rows, np.array([rows - 1])) == many([None if step is None else step[-1] for step in steps])
