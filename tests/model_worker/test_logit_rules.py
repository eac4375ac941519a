"""Each rule that changes logits does what its reference in float64 does, and touches nothing else."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from row_maker import sample_rows
from rule_reference import ruled_logits

from model_worker.logit_rules import apply_rules
from tessera.values.sampling import SamplingParams

VOCAB = 30
EOS = np.array([2, 9])
PLAIN = SamplingParams(seed=0)

token = st.integers(0, VOCAB - 1)
history = st.lists(token, max_size=12)
ruled_params = st.builds(
    SamplingParams,
    seed=st.just(0),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.3, -1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.5, 100.0]),
    logit_bias=st.dictionaries(token, st.sampled_from([-100.0, -0.5, 3.25, 100.0]), max_size=4).map(
        lambda biases: tuple(biases.items())
    ),
    allowed_token_ids=st.lists(token, max_size=3).map(lambda ids: tuple([*ids, 11, 12, 12]) if ids else ()),
    bad_words_ids=st.lists(st.lists(token, min_size=1, max_size=4).map(tuple), max_size=4).map(tuple),
    min_tokens=st.sampled_from([0, 0, 3, 9]),
    stop_token_ids=st.lists(token, max_size=2).map(tuple),
)


def ruled(logits: np.ndarray, params: SamplingParams, prompt: list[int], outputs: list[int]) -> np.ndarray:
    changed = logits.copy().reshape(1, -1)
    rows = sample_rows([params], [len(outputs)], len(logits), prompts=[prompt], outputs=[outputs])
    apply_rules(changed, rows, EOS)
    return changed[0]


@settings(max_examples=300, deadline=None)
@given(params=ruled_params, prompt=history, outputs=history, seed=st.integers(0, 99), data=st.data())
def test_rules_are_the_float64_reference_s(
    params: SamplingParams, prompt: list[int], outputs: list[int], seed: int, data: st.DataObject
) -> None:
    logits = np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32) * np.float32(3)
    if len(outputs) > 1 and data.draw(st.booleans()):  # a bad word that fits
        start = data.draw(st.integers(0, len(outputs) - 1))
        params = replace(params, bad_words_ids=(*params.bad_words_ids, (*outputs[start:], 17)))
    np.testing.assert_allclose(
        ruled(logits, params, prompt, outputs),
        ruled_logits(logits, params, prompt, outputs, EOS.tolist()),
        rtol=1e-5,
        atol=1e-5,
    )


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(ruled_params, history, history), min_size=2, max_size=6), seed=st.integers(0, 99))
def test_rows_are_ruled_together_as_they_are_alone(rows: list[tuple[SamplingParams, list[int], list[int]]], seed: int) -> None:
    logits = np.random.default_rng(seed).normal(size=(len(rows), VOCAB)).astype(np.float32)
    params, prompts, outputs = (list(column) for column in zip(*rows, strict=True))
    together = logits.copy()
    indices = [len(output) for output in outputs]
    apply_rules(together, sample_rows(params, indices, VOCAB, prompts=prompts, outputs=outputs), EOS)
    for row, (row_params, prompt, output) in enumerate(rows):
        assert together[row].tobytes() == ruled(logits[row], row_params, prompt, output).tobytes()


def changed_ids(params: SamplingParams, prompt: list[int], outputs: list[int]) -> list[int]:
    ones = np.ones(VOCAB, np.float32)
    return np.flatnonzero(ruled(ones, params, prompt, outputs) != ones).tolist()


def test_presence_and_frequency_see_the_output_alone_repetition_the_prompt_too() -> None:
    for name in ("presence_penalty", "frequency_penalty"):
        assert changed_ids(replace(PLAIN, **{name: 1.0}), [4, 5], [6, 6, 7]) == [6, 7]
    assert changed_ids(replace(PLAIN, repetition_penalty=2.0), [4, 5], [6, 6, 7]) == [4, 5, 6, 7]


def test_frequency_counts_and_presence_does_not() -> None:
    logits = np.zeros(VOCAB, np.float32)
    assert ruled(logits, replace(PLAIN, frequency_penalty=0.5), [6], [6, 7, 6])[[6, 7]].tolist() == [-1.0, -0.5]
    assert ruled(logits, replace(PLAIN, presence_penalty=0.5), [6], [6, 7, 6])[[6, 7]].tolist() == [-0.5, -0.5]


def test_repetition_pushes_logits_of_both_signs_down_once() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[[6, 7]] = 3.0, -3.0
    assert ruled(logits, replace(PLAIN, repetition_penalty=2.0), [6, 6, 7], [7, 6])[[6, 7]].tolist() == [1.5, -6.0]


@pytest.mark.parametrize(
    ("word", "outputs", "is_ruled_out"),
    [
        ((5,), [], True),
        ((5,), [1, 2], True),
        ((1, 5), [1], True),
        ((1, 5), [1, 3], False),
        ((1, 5), [], False),  # the prompt ends with 1: a word begins in the output
        ((8, 1, 5), [1], False),  # neither across the border
        ((1, 1, 5), [1, 1, 1], True),
        ((1, 2, 5), [1, 2], True),
        ((2, 1, 5), [1, 2], False),
    ],
)
def test_a_bad_word_loses_its_last_id_where_the_output_ends_with_the_others(
    word: tuple[int, ...], outputs: list[int], is_ruled_out: bool
) -> None:
    params = replace(PLAIN, bad_words_ids=(word, (20, 21)))
    assert changed_ids(params, [8, 1], outputs) == ([word[-1]] if is_ruled_out else [])


def test_bias_comes_before_the_penalties() -> None:
    logits = np.full(VOCAB, -1.0, np.float32)
    params = replace(PLAIN, logit_bias=((6, 5.0),), repetition_penalty=2.0)
    assert ruled(logits, params, [6], [])[6] == 2.0  # (-1 + 5) / 2, not -1 * 2 + 5


def test_a_bias_does_not_bring_back_what_is_ruled_out() -> None:
    params = replace(PLAIN, allowed_token_ids=(3, 4), bad_words_ids=((4,),), logit_bias=((4, 100.0), (5, 100.0)))
    assert np.flatnonzero(np.isfinite(ruled(np.zeros(VOCAB, np.float32), params, [], []))).tolist() == [3]


def test_ids_beyond_the_vocabulary_touch_no_neighbour() -> None:
    beyond = (VOCAB, VOCAB + 3, 2**31)
    params = SamplingParams(
        seed=0,
        logit_bias=tuple((token, 5.0) for token in beyond),
        bad_words_ids=tuple((token,) for token in beyond),
        stop_token_ids=beyond,
        min_tokens=1,
    )
    logits = np.zeros((2, VOCAB), np.float32)
    apply_rules(logits, sample_rows([params, PLAIN], [0, 0], VOCAB), EOS)
    assert np.flatnonzero(logits).tolist() == EOS.tolist()
