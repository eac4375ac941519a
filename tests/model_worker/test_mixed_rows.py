"""All rules, filters and log-probabilities together: a row gives what the float64 reference gives, bit for bit the same beside any others."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from row_maker import sample_rows
from rule_reference import drawn_token, probabilities, ruled_logits

from model_worker import workspace
from model_worker.sample_rows import SampleRows
from model_worker.sampler import Sampled, Sampler
from tessera.values.sampling import SamplingParams

VOCAB = 700
EOS = (2, 9)

token = st.integers(0, VOCAB - 1)
params_of_all_kinds = st.builds(
    SamplingParams,
    seed=st.integers(0, 2**63 - 1),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7, 100.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 9, 300, VOCAB]),
    top_p=st.sampled_from([1.0, 1.0, 1e-6, 0.4, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 1e-6, 0.1, 1.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    logit_bias=st.sampled_from([(), (), ((3, 4.5), (600, -100.0))]),
    allowed_token_ids=st.sampled_from([(), (), (), (3, 4, 5, 699), (17,)]),
    bad_words_ids=st.sampled_from([(), (), ((3,), (4, 5))]),
    min_tokens=st.sampled_from([0, 0, 3]),
    logprobs=st.sampled_from([None, None, 0, 1, 20]),
    logprob_token_ids=st.sampled_from([(), (), (3, 5)]),
)
one_row = st.tuples(params_of_all_kinds, st.lists(st.sampled_from([3, 4, 5, 100, 17]), max_size=6), st.integers(0, 1000))
PROMPT = [3, 8, 100]


def logits_of(seeds: list[int]) -> np.ndarray:
    """Some of them spread, some nearly flat, so that filters leave few tokens or many."""
    rows = []
    for seed in seeds:
        random = np.random.default_rng(seed)
        rows.append(random.normal(size=VOCAB).astype(np.float32) * np.float32(random.choice([0.1, 1, 3])))
    return np.stack(rows)


def rows_of(rows: list[tuple[SamplingParams, list[int], int]]) -> SampleRows:
    outputs = [output for _, output, _ in rows]
    return sample_rows(
        [params for params, _, _ in rows],
        [len(output) for output in outputs],
        VOCAB,
        prompts=[PROMPT] * len(rows),
        outputs=outputs,
    )


def entries(sampled: Sampled, row: int) -> tuple[list[int], bytes, int]:
    """The log-probabilities of one row: ids, numbers bit for bit, rank."""
    found = sampled.logprobs
    if found is None:
        return [], b"", 0
    end = int(found.counts[: row + 1].sum())
    own = slice(end - int(found.counts[row]), end)
    return found.token_ids[own].tolist(), found.logprobs[own].tobytes(), int(found.ranks[row])


@pytest.fixture(params=[(4 * VOCAB, 1), (12 * VOCAB, 2), (1 << 20, 1)], ids=["rows-alone", "threes-two-threads", "one-chunk"])
def sampler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Sampler:
    """With chunks of one row, of three rows on two threads, or of all rows."""
    chunk_bytes, num_threads = request.param
    monkeypatch.setattr(workspace, "CHUNK_BYTES", chunk_bytes)
    return Sampler(EOS, num_threads)


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(one_row, min_size=2, max_size=12), data=st.data())
def test_a_row_alone_is_the_row_in_any_batch_bit_for_bit(
    rows: list[tuple[SamplingParams, list[int], int]], data: st.DataObject
) -> None:
    logits = logits_of([seed for _, _, seed in rows])
    order = data.draw(st.permutations(range(len(rows))))
    together = Sampler(EOS).sample(logits[order], rows_of([rows[i] for i in order]))
    for place, row in enumerate(order):
        alone = Sampler(EOS).sample(logits[row : row + 1], rows_of([rows[row]]))
        assert together.token_ids[place] == alone.token_ids[0]
        assert (place in together.failures) == (0 in alone.failures)
        assert entries(together, place) == entries(alone, 0)


def many_rows(num_rows: int) -> tuple[np.ndarray, list[tuple[SamplingParams, list[int], int]]]:
    """Rows of all kinds, drawn once and for all."""
    random = np.random.default_rng(5)
    filters: list[dict[str, object]] = [
        {},
        {"top_k": 5},
        {"top_k": 300},
        {"top_p": 0.7},
        {"top_p": 0.99},
        {"min_p": 0.05},
        {"temperature": 0.0},
    ]
    rules: list[dict[str, object]] = [
        {},
        {},
        {"presence_penalty": 1.0, "repetition_penalty": 1.2},
        {"allowed_token_ids": (3, 4, 5)},
        {"logprobs": 3},
    ]
    rows = [
        (
            SamplingParams(seed=row, **filters[row % len(filters)], **rules[row % len(rules)]),  # type: ignore[arg-type]
            random.choice([3, 4, 5], row % 4).tolist(),
            row,
        )
        for row in range(num_rows)
    ]
    return logits_of(list(range(num_rows))), rows


def test_chunks_and_threads_change_nothing(sampler: Sampler) -> None:
    logits, rows = many_rows(70)
    before = logits.tobytes()
    sampled = sampler.sample(logits, rows_of(rows))
    assert logits.tobytes() == before, "logits are not mutated"
    for row in range(len(rows)):
        alone = Sampler(EOS).sample(logits[row : row + 1], rows_of([rows[row]]))
        assert sampled.token_ids[row] == alone.token_ids[0]
        assert entries(sampled, row) == entries(alone, 0)


@settings(max_examples=300, deadline=None)
@given(row=one_row)
def test_a_row_with_all_rules_gives_the_float64_reference_s_token(row: tuple[SamplingParams, list[int], int]) -> None:
    params, outputs, seed = row
    logits = logits_of([seed])
    ruled = ruled_logits(logits[0], params, PROMPT, outputs, EOS)
    sampled = Sampler(EOS).sample(logits, rows_of([row]))
    if np.isneginf(ruled).all():
        assert set(sampled.failures) == {0}
    else:
        assert sampled.token_ids[0] == drawn_token(ruled, params, len(outputs))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=0, presence_penalty=1.0, frequency_penalty=0.4, repetition_penalty=1.2),
        SamplingParams(seed=0, logit_bias=((3, 3.0), (5, -2.0)), allowed_token_ids=(3, 4, 5, 6, 100), temperature=1.3),
        SamplingParams(seed=0, bad_words_ids=((3,), (4, 5)), top_p=0.8, min_tokens=9),
        SamplingParams(seed=0, temperature=0.7, top_k=12, top_p=0.95, min_p=0.03, repetition_penalty=0.8),
    ],
    ids=["penalties", "bias-of-allowed", "bad-words", "filters"],
)
def test_tokens_follow_the_distribution_that_the_rules_leave(params: SamplingParams) -> None:
    logits = np.random.default_rng(3).normal(size=(1, 40)).astype(np.float32) * np.float32(2)
    params = replace(params, allowed_token_ids=tuple(token for token in params.allowed_token_ids if token < 40))
    outputs, num_draws = [3, 4, 4], 4000
    rows = sample_rows(
        [replace(params, seed=seed) for seed in range(num_draws)],
        [len(outputs)] * num_draws,
        40,
        prompts=[[5, 8]] * num_draws,
        outputs=[outputs] * num_draws,
    )
    tokens = Sampler(EOS).sample(np.repeat(logits, num_draws, axis=0), rows).token_ids
    p = probabilities(ruled_logits(logits[0], params, [5, 8], outputs, EOS), params)
    counts = np.bincount(tokens, minlength=40)
    assert counts[p == 0].sum() == 0
    common = p * num_draws >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(p[common], p[~common].sum()) * num_draws
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    chi_square = ((observed - expected) ** 2 / expected).sum()
    assert chi_square < freedom + 3.1 * np.sqrt(2 * freedom) + 7  # about p = 0.001; the seeds are fixed


def test_children_with_seeds_of_their_own_draw_different_tokens_and_the_same_seed_the_same() -> None:
    logits = np.zeros((6, VOCAB), np.float32)
    seeds = [1, 2, 3, 1, 2, 3]
    rows = sample_rows([SamplingParams(seed=seed) for seed in seeds], [4] * 6, VOCAB)
    tokens = Sampler(EOS).sample(logits, rows).token_ids.tolist()
    assert len(set(tokens[:3])) == 3 and tokens[:3] == tokens[3:]
    next_tokens = Sampler(EOS).sample(logits, sample_rows([SamplingParams(seed=seed) for seed in seeds], [5] * 6, VOCAB))
    assert next_tokens.token_ids.tolist() != tokens


def test_rows_of_drafts_draw_as_if_the_drafts_were_outputs() -> None:
    """One slot, three rows: behind its own ids lie two drafts, which penalties, bad words, min_tokens and the noise all see."""
    params = SamplingParams(
        seed=11, presence_penalty=2.0, repetition_penalty=1.5, bad_words_ids=((40, 41), (30, 40, 42)), min_tokens=3, logprobs=2
    )
    logits = logits_of([1, 2, 3])
    drafts = [30, 40]
    one_slot = sample_rows([params], [0], VOCAB, prompts=[PROMPT], outputs=[[100, *drafts]])
    rows = replace(
        one_slot,
        slots=np.zeros(3, np.int64),
        prompt_lens=np.full(3, len(PROMPT)),
        history_lens=len(PROMPT) + 1 + np.arange(3),
        samples=np.ones(3, np.bool_),
    )
    drafted = Sampler(EOS).sample(logits, rows)
    for row in range(3):
        plain = Sampler(EOS).sample(logits[row : row + 1], rows_of([(params, [100, *drafts[:row]], 0)]))
        assert drafted.token_ids[row] == plain.token_ids[0]
        assert entries(drafted, row) == entries(plain, 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_without_finite_logits_fails_alone_among_all_kinds(bad: float, sampler: Sampler) -> None:
    logits, rows = many_rows(40)
    expected = sampler.sample(logits, rows_of(rows))
    broken = {0, 7, 13, 39}
    for row in broken:
        logits[row, row + 1] = bad
    sampled = sampler.sample(logits, rows_of(rows))
    assert set(sampled.failures) == broken
    for row in range(40):
        if row in broken:
            assert sampled.token_ids[row] == -1 and entries(sampled, row) == ([], b"", 0)
        else:
            assert sampled.token_ids[row] == expected.token_ids[row] and entries(sampled, row) == entries(expected, row)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_every_token_ruled_out_fails_alone(temperature: float, sampler: Sampler) -> None:
    allowed = SamplingParams(seed=3, temperature=temperature, allowed_token_ids=(3, 4), top_k=4, logprobs=1)
    rows = [
        (replace(allowed, bad_words_ids=((3,), (4,))), [], 1),
        (allowed, [], 1),
        (replace(allowed, allowed_token_ids=EOS, min_tokens=1), [], 1),
        (replace(allowed, allowed_token_ids=EOS, min_tokens=1), [5], 1),
    ]
    logits = logits_of([1, 2, 3, 4])
    sampled = sampler.sample(logits, rows_of(rows))
    assert set(sampled.failures) == {0, 2} and sampled.token_ids[[0, 2]].tolist() == [-1, -1]
    assert "allowed_token_ids" in sampled.failures[0]
    assert sampled.token_ids[1] in (3, 4) and sampled.token_ids[3] in EOS
    assert sampled.logprobs is not None and sampled.logprobs.counts.tolist() == [0, 2, 0, 2]


def test_rows_that_do_not_sample_are_only_checked() -> None:
    logits, rows = many_rows(10)
    logits[4, 1] = np.nan
    sampled = Sampler(EOS).sample(logits, replace(rows_of(rows), samples=np.arange(10) % 2 == 1))
    assert set(sampled.failures) == {4} and (sampled.token_ids[::2] == -1).all()
    assert sampled.token_ids[1] == Sampler(EOS).sample(logits[1:2], rows_of(rows[1:2])).token_ids[0]
