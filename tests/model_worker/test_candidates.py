"""Candidates hold every token that a filter may leave, and are the same whatever rows are beside."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from model_worker.candidates import compact, joined, top_floors


@settings(max_examples=80, deadline=None)
@given(vocab=st.sampled_from([5, 64, 999, 5000]), num_rows=st.integers(1, 4), seed=st.integers(0, 99), data=st.data())
def test_a_floor_is_reached_by_k_logits_at_least(vocab: int, num_rows: int, seed: int, data: st.DataObject) -> None:
    logits = np.random.default_rng(seed).normal(size=(num_rows, vocab)).astype(np.float32)
    if data.draw(st.booleans()):
        logits = np.round(logits)  # many ties
    ks = np.array(data.draw(st.lists(st.integers(1, vocab), min_size=num_rows, max_size=num_rows)))
    floors = top_floors(logits, ks)
    assert ((logits >= floors[:, None]).sum(axis=1) >= ks).all()


def test_a_floor_of_a_large_vocabulary_is_close_to_the_kth() -> None:
    logits = np.random.default_rng(1).normal(size=(4, 128_000)).astype(np.float32)
    floors = top_floors(logits, np.array([1, 20, 50, 200]))
    assert ((logits >= floors[:, None]).sum(axis=1) <= [1, 21, 53, 240]).all()


def test_candidates_are_ascending_and_padded() -> None:
    logits = np.arange(12, dtype=np.float32).reshape(3, 4)
    rows, candidates = compact(logits, np.array([[0, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]], np.bool_), 4)
    assert rows.tolist() == [0, 1, 2]
    assert candidates.token_ids.tolist() == [[1, 3], [0, 0], [0, 0]]
    assert candidates.logits.tolist() == [[1, 3], [-np.inf, -np.inf], [8, -np.inf]]


def test_rows_with_too_many_are_left_out() -> None:
    logits = np.arange(12, dtype=np.float32).reshape(3, 4)
    rows, candidates = compact(logits, logits >= 6, 2)
    assert rows.tolist() == [0, 1] and candidates.token_ids.tolist() == [[0, 0], [2, 3]]


def test_joined_rows_are_those_of_the_parts() -> None:
    logits = np.arange(8, dtype=np.float32).reshape(2, 4)
    parts = [compact(logits, logits > floor, 4)[1] for floor in (5, 2)]
    whole = joined(parts)
    assert whole.token_ids.tolist() == [[0] * 4, [2, 3, 0, 0], [3, 0, 0, 0], [0, 1, 2, 3]]
    assert np.isfinite(whole.logits).sum(axis=1).tolist() == [0, 2, 1, 4]
