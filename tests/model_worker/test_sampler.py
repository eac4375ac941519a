"""Sampled tokens follow the exact distribution, whatever filters and neighbours a row has, and failures stay in their row."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from row_maker import sample_rows
from rule_reference import probabilities

from model_worker.noise import exponentials, noise_words
from model_worker.sampler import Sampler
from tessera.values.sampling import SamplingParams
from tessera.values.sampling_limits import NUMBER_LIMITS

VOCAB = 40
EOS = (2, 9)
SAMPLER = Sampler(EOS)


def some_logits(rows: int, seed: int = 0, vocab: int = VOCAB, scale: float = 2.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, vocab)).astype(np.float32) * np.float32(scale)


def reference_token(logits: np.ndarray, params: SamplingParams, output_index: int) -> int:
    """The Gumbel-max draw in float64 over the whole vocabulary."""
    p = probabilities(logits.astype(np.float64), params)
    draws = exponentials(noise_words(params.seed, output_index, len(logits)))
    with np.errstate(divide="ignore"):
        return int(np.argmin(draws / p))


def sample_one(logits: np.ndarray, params: SamplingParams, output_index: int = 0) -> int:
    sampled = SAMPLER.sample(logits.reshape(1, -1), sample_rows([params], [output_index], len(logits)))
    assert not sampled.failures
    return int(sampled.token_ids[0])


FILTERS = [
    SamplingParams(seed=0),
    SamplingParams(seed=0, temperature=0.7),
    SamplingParams(seed=0, temperature=3.0),
    SamplingParams(seed=0, top_k=5),
    SamplingParams(seed=0, top_p=0.8),
    SamplingParams(seed=0, temperature=5.0, top_p=0.6),
    SamplingParams(seed=0, min_p=0.05),
    SamplingParams(seed=0, temperature=1.5, top_k=12, top_p=0.9, min_p=0.02),
]


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_tokens_follow_the_distribution(params: SamplingParams) -> None:
    logits = some_logits(1)
    p = probabilities(logits[0].astype(np.float64), params)
    num_draws = 4000
    batch = np.repeat(logits, num_draws, axis=0)
    rows = [SamplingParams(**{**_asdict(params), "seed": seed}) for seed in range(num_draws)]
    sampled = SAMPLER.sample(batch, sample_rows(rows, [3] * num_draws, VOCAB))
    counts = np.bincount(sampled.token_ids, minlength=VOCAB)
    assert counts[p == 0].sum() == 0
    common = p * num_draws >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(p[common], p[~common].sum()) * num_draws
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    chi_square = ((observed - expected) ** 2 / expected).sum()
    assert chi_square < freedom + 3.1 * np.sqrt(2 * freedom) + 7  # about p = 0.001; the seeds are fixed


def _asdict(params: SamplingParams) -> dict[str, object]:
    return {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}


params_in_range = st.builds(
    SamplingParams,
    seed=st.integers(0, int(NUMBER_LIMITS["seed"].maximum)),
    temperature=st.sampled_from([1e-3, 0.1, 0.7, 1.0, 1.8, 100.0]),
    top_k=st.sampled_from([0, -1, 1, 3, VOCAB - 1, VOCAB, 2**31 - 1]),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.95, 1 - 1e-6, 1.0]),
    min_p=st.sampled_from([0.0, 1e-5, 0.1, 1.0]),
)


@settings(max_examples=300, deadline=None)
@given(params=params_in_range, output_index=st.integers(0, 2**20), logits_seed=st.integers(0, 50))
def test_a_token_is_the_float64_reference_s(params: SamplingParams, output_index: int, logits_seed: int) -> None:
    logits = some_logits(1, seed=logits_seed)[0]
    assert sample_one(logits, params, output_index) == reference_token(logits, params, output_index)


@pytest.mark.parametrize("params", [*FILTERS, SamplingParams(seed=0, temperature=100.0, top_p=0.999)], ids=str)
def test_a_large_vocabulary_gives_the_reference_s_tokens(params: SamplingParams) -> None:
    logits = some_logits(1, vocab=49152, scale=3.0)[0]
    for output_index in range(10):
        assert sample_one(logits, params, output_index) == reference_token(logits, params, output_index)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(params_in_range | st.just(SamplingParams(seed=0, temperature=0.0)), st.integers(0, 99)),
        min_size=2,
        max_size=6,
    ),
    data=st.data(),
)
def test_neighbours_do_not_change_a_token(rows: list[tuple[SamplingParams, int]], data: st.DataObject) -> None:
    logits = some_logits(len(rows), seed=data.draw(st.integers(0, 20)))
    order = data.draw(st.permutations(range(len(rows))))
    together = SAMPLER.sample(logits[order], sample_rows([rows[i][0] for i in order], [rows[i][1] for i in order], VOCAB))
    for position, row in enumerate(order):
        assert together.token_ids[position] == sample_one(logits[row], *rows[row])


def test_greedy_takes_the_first_of_the_best() -> None:
    logits = np.zeros(VOCAB, dtype=np.float32)
    logits[[7, 20]] = 3.0
    assert sample_one(logits, SamplingParams(seed=5, temperature=0.0)) == 7


def test_filters_keep_ties() -> None:
    logits = np.full(VOCAB, -5.0, dtype=np.float32)
    logits[[3, 8, 11]] = 1.0
    tokens = {sample_one(logits, SamplingParams(seed=seed, top_k=1)) for seed in range(50)}
    assert tokens == {3, 8, 11}


@pytest.mark.parametrize("field", ["temperature", "top_p", "top_k", "min_p", "seed"])
def test_the_edges_of_every_limit_draw_a_possible_token(field: str) -> None:
    limit = NUMBER_LIMITS[field]
    logits = some_logits(1)[0]
    for value in (limit.minimum, limit.maximum):
        fields = {"seed": 1, field: int(value) if limit.integer else value}
        params = SamplingParams(**fields)
        token = sample_one(logits, params, output_index=2**20)
        greedy = params.temperature == 0
        p = probabilities(logits.astype(np.float64), SamplingParams(**{**fields, "temperature": 1e-9}) if greedy else params)
        assert p[token] > 0


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-38, 1e-9])
def test_a_temperature_close_to_zero_is_nearly_greedy(temperature: float) -> None:
    logits = some_logits(1)[0]
    for seed in range(20):
        assert sample_one(logits, SamplingParams(seed=seed, temperature=temperature)) == int(logits.argmax())


def test_large_logits_do_not_overflow() -> None:
    logits = some_logits(1, scale=1e4)[0]
    assert sample_one(logits, SamplingParams(seed=3)) == int(logits.argmax())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_masks_eos_and_stop_ids_until_it_is_reached(temperature: float) -> None:
    logits = np.full(VOCAB, -3.0, dtype=np.float32)
    logits[[2, 9, 30]] = 50.0  # two EOS and a stop token id
    logits[4] = 20.0
    params = SamplingParams(seed=1, temperature=temperature, min_tokens=3, stop_token_ids=(30, VOCAB, 2**31))
    assert [sample_one(logits, params, index) for index in range(3)] == [4, 4, 4]
    assert sample_one(logits, params, 3) in (2, 9, 30)


def test_min_tokens_changes_only_its_own_row() -> None:
    logits = np.zeros((2, VOCAB), dtype=np.float32)
    logits[:, 2] = 9.0
    rows = [SamplingParams(seed=1, temperature=0.0, min_tokens=1), SamplingParams(seed=1, temperature=0.0)]
    assert SAMPLER.sample(logits, sample_rows(rows, [0, 0], VOCAB)).token_ids.tolist() == [0, 2]


def test_ruling_out_the_whole_vocabulary_fails_that_row() -> None:
    params = SamplingParams(seed=1, temperature=1.0, min_tokens=1, stop_token_ids=(0, 1))
    sampled = Sampler((2,)).sample(
        np.zeros((2, 3), dtype=np.float32), sample_rows([params, SamplingParams(seed=1, temperature=0.0)], [0, 0], 3)
    )
    assert set(sampled.failures) == {0} and "min_tokens" in sampled.failures[0]
    assert sampled.token_ids[1] == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_finite_logits_fails_alone(bad: float, temperature: float) -> None:
    logits = some_logits(3)
    params = [SamplingParams(seed=row, temperature=temperature, top_p=0.9, min_tokens=1) for row in range(3)]
    expected = SAMPLER.sample(logits.copy(), sample_rows(params, [0, 0, 0], VOCAB)).token_ids
    logits[1, 17] = bad
    sampled = SAMPLER.sample(logits, sample_rows(params, [0, 0, 0], VOCAB))
    assert set(sampled.failures) == {1}
    assert sampled.token_ids[[0, 2]].tolist() == expected[[0, 2]].tolist()
