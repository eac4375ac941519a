"""Candidates hold every token that a filter may leave, and are the same whatever rows are beside."""

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from row_maker import sample_rows

from model_worker.candidates import compact, joined, top_floors
from model_worker.draws import Draws
from model_worker.sampling_table import Filter
from model_worker.token_draw import narrow
from model_worker.workspace import Workspace
from tessera.values.sampling import SamplingParams


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


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 999),
    scale=st.sampled_from([0.01, 1.0, 30.0]),
    offset=st.sampled_from([0.0, 1e4]),
    temperature=st.sampled_from([0.01, 0.7, 1.0, 100.0]),
    place=st.integers(0, 63),
)
@example(seed=273, scale=1.0, offset=0.0, temperature=0.01, place=12)  # a likelihood of 30 times the smallest number of float32
def test_a_token_at_the_edge_of_min_p_is_a_candidate(
    seed: int, scale: float, offset: float, temperature: float, place: int
) -> None:
    """min_p is exactly the likelihood of the token, as float32 has it: the filter keeps it, so the bound must."""
    logits = np.random.default_rng(seed).normal(size=(1, 6400)).astype(np.float32) * np.float32(scale) + np.float32(offset)
    best = logits.max(axis=1)
    likelihoods = np.exp((logits[0] - best[0]) / np.float32(temperature))
    edge = np.argsort(-likelihoods)[place]
    if likelihoods[edge] == 0:
        return
    row = sample_rows([SamplingParams(seed=0, temperature=temperature, min_p=float(likelihoods[edge]))], [0], 6400)
    parts = narrow(logits, best, Draws.of(row, np.arange(1)), Filter.MIN_P, Workspace(6400))
    kept = parts[0].candidates.token_ids[0].tolist() if parts else range(6400)
    assert edge in kept and len(kept) <= 6400
    if scale >= 1 and temperature <= 1 and offset == 0:
        assert len(kept) <= place + 2, "and the bound is close"
