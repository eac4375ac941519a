"""Log-probabilities are those of log-softmax in float64, with the likeliest ids in order and the ids that were asked for."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from row_maker import sample_rows

from model_worker.logprobs import NO_IDS, logprobs_of
from model_worker.sampler import Sampler
from tessera.values.logprobs import Logprobs
from tessera.values.sampling import SamplingParams


def some_logits(num_rows: int, vocab: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(num_rows, vocab)).astype(np.float32) * np.float32(3)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def entries(found: Logprobs, row: int) -> tuple[list[int], np.ndarray]:
    end = int(found.counts[: row + 1].sum())
    own = slice(end - int(found.counts[row]), end)
    return found.token_ids[own].tolist(), found.logprobs[own]


@settings(max_examples=100, deadline=None)
@given(
    vocab=st.sampled_from([3, 50, 3000]),
    seed=st.integers(0, 99),
    num_top=st.lists(st.sampled_from([-1, 0, 1, 5, 20]), min_size=1, max_size=5),
    data=st.data(),
)
def test_entries_are_the_float64_reference_s(vocab: int, seed: int, num_top: list[int], data: st.DataObject) -> None:
    logits = some_logits(len(num_top), vocab, seed)
    if data.draw(st.booleans()):
        logits = np.round(logits)  # many ties
    token = st.integers(0, vocab - 1)
    own = data.draw(st.lists(token, min_size=len(num_top), max_size=len(num_top)))
    asked = [data.draw(st.lists(token, max_size=3)) for _ in num_top]
    found = logprobs_of(logits, np.array(own), np.array(num_top), [np.array(ids, np.int64) for ids in asked])
    for row, top in enumerate(num_top):
        ids, logprobs = entries(found, row)
        if top < 0:
            assert ids == [] and found.ranks[row] == 0
            continue
        expected = log_softmax(logits[row])
        likeliest = np.lexsort((np.arange(vocab), -logits[row]))[:top].tolist()
        assert ids == [own[row], *likeliest, *asked[row]]
        np.testing.assert_allclose(logprobs, expected[ids], atol=3e-6, rtol=1e-6)
        assert found.ranks[row] == (logits[row] >= logits[row][own[row]]).sum()


def test_a_large_vocabulary_s_are_torch_s() -> None:
    torch = pytest.importorskip("torch")
    logits = some_logits(5, 128_000)
    own = np.array([0, 5, 127_999, 64_000, 1])
    found = logprobs_of(logits, own, np.full(5, 20), [NO_IDS] * 5)
    expected = torch.log_softmax(torch.from_numpy(logits), dim=-1)
    values, ids = expected.topk(20, dim=-1)
    for row in range(5):
        found_ids, logprobs = entries(found, row)
        assert found_ids == [own[row], *ids[row].tolist()]
        np.testing.assert_allclose(logprobs, [expected[row, own[row]], *values[row]], atol=1e-5)


def sampled_logprobs(params: list[SamplingParams], logits: np.ndarray) -> tuple[list[int], Logprobs | None]:
    sampled = Sampler(()).sample(logits, sample_rows(params, [0] * len(params), logits.shape[1]))
    return sampled.token_ids.tolist(), sampled.logprobs


def test_each_row_gets_what_it_asked_for_and_no_more() -> None:
    """One asks for the two likeliest, one for ids 3 and 5 alone, one for nothing, one for the token itself."""
    logits = some_logits(4, 30)
    params = [
        SamplingParams(seed=1, logprobs=2),
        SamplingParams(seed=2, logprob_token_ids=(3, 5)),
        SamplingParams(seed=3),
        SamplingParams(seed=4, logprobs=0),
    ]
    tokens, found = sampled_logprobs(params, logits)
    assert found is not None and found.counts.tolist() == [3, 3, 0, 1]
    best = np.argsort(-logits, axis=1)
    assert entries(found, 0)[0] == [tokens[0], *best[0, :2].tolist()]
    assert entries(found, 1)[0] == [tokens[1], 3, 5]
    assert entries(found, 3)[0] == [tokens[3]]


def test_no_row_that_asks_gives_none() -> None:
    assert sampled_logprobs([SamplingParams(seed=1)] * 2, some_logits(2, 30))[1] is None


def test_they_are_the_model_s_own_whatever_the_rules_and_the_temperature() -> None:
    logits = some_logits(1, 30)
    params = SamplingParams(
        seed=1, temperature=0.2, top_k=3, allowed_token_ids=(7, 8), logit_bias=((7, 9.0),), logprobs=30, logprob_token_ids=(8,)
    )
    tokens, found = sampled_logprobs([params], logits)
    assert found is not None and tokens[0] in (7, 8)
    ids, logprobs = entries(found, 0)
    np.testing.assert_allclose(logprobs, log_softmax(logits[0])[ids], atol=1e-5)
    assert np.exp(logprobs[1:31].astype(np.float64)).sum() == pytest.approx(1, abs=1e-5)


def test_a_sampled_token_of_the_best_rank_has_rank_one() -> None:
    logits = some_logits(1, 30)
    _, found = sampled_logprobs([SamplingParams(seed=1, temperature=0.0, logprobs=1)], logits)
    assert found is not None and found.ranks.tolist() == [1]
    ids, logprobs = entries(found, 0)
    assert ids[0] == ids[1] and logprobs[0] == logprobs[1]
