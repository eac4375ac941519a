"""The table of sampling parameters: the document shows it, and whole sets of parameters are judged by it."""

from dataclasses import fields, replace

import pytest

from tessera.values.sampling import SamplingParams
from tessera.values.sampling_limits import LIST_LIMITS, NUMBER_LIMITS, FieldProblem, accepted_params, number_verdict
from tests.sampling_table import DOCUMENT, VOCAB, list_edges, list_verdict, number_edges, with_tables

PLAIN = SamplingParams(seed=1)


def test_the_document_shows_the_table() -> None:
    text = DOCUMENT.read_text()
    assert text == with_tables(text), "run `make sampling-table`"
    assert text.count("| refused |") > 50 and text.count("| clamped to ") == 2


def test_every_field_has_a_limit() -> None:
    without = {"ignore_eos"}  # both values are
    assert {field.name for field in fields(SamplingParams)} - without == {*NUMBER_LIMITS, *LIST_LIMITS}


def test_defaults_are_accepted_as_they_are() -> None:
    assert accepted_params(PLAIN, VOCAB) is PLAIN
    for name, limit in NUMBER_LIMITS.items():
        assert getattr(PLAIN, name) == (1 if name == "seed" else limit.default)


@pytest.mark.parametrize("field", NUMBER_LIMITS)
def test_a_number_at_an_edge_is_judged_as_the_table_says(field: str) -> None:
    for value in number_edges(NUMBER_LIMITS[field]):
        judged = accepted_params(replace(PLAIN, **{"max_tokens": 2**20, field: value}), VOCAB)
        problems = [] if isinstance(judged, SamplingParams) else [problem.field for problem in judged]
        expected = number_verdict(NUMBER_LIMITS[field], value)
        assert problems == ([field] if expected == "refused" else []), (value, judged)


def test_lists_of_the_table_are_judged_both_ways() -> None:
    for name in LIST_LIMITS:
        verdicts = {list_verdict(name, value) for _, value in list_edges(name)}
        assert verdicts == {"accepted", "refused"}, name


def test_a_bias_is_clamped_and_everything_else_stays() -> None:
    params = replace(PLAIN, logit_bias=((3, 1e6), (4, -100.5), (5, 0.25)), top_k=3)
    assert accepted_params(params, VOCAB) == replace(params, logit_bias=((3, 100.0), (4, -100.0), (5, 0.25)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"min_tokens": 9, "max_tokens": 8}, FieldProblem("min_tokens", "is 9, above max_tokens, which is 8")),
        ({"logit_bias": ((7, 1.0), (8, 1.0), (7, 2.0))}, FieldProblem("logit_bias", "has the id 7 more than once")),
        (
            {"logit_bias": ((7, float("nan")),)},
            FieldProblem("logit_bias", "of the id 7 must be a finite number, got nan"),
        ),
        (
            {"allowed_token_ids": (1, VOCAB)},
            FieldProblem("allowed_token_ids", "has the id 49152; the vocabulary has 0 to 49151"),
        ),
        ({"bad_words_ids": ((1,), ())}, FieldProblem("bad_words_ids", "has a sequence of 0 ids; 1 to 32 are taken")),
        ({"bad_words_ids": ((1,) * 33,)}, FieldProblem("bad_words_ids", "has a sequence of 33 ids; 1 to 32 are taken")),
        ({"logprobs": 21}, FieldProblem("logprobs", "must be between 0 and 20, got 21")),
    ],
)
def test_a_refusal_names_its_field_and_shows_the_value(changes: dict[str, object], said: FieldProblem) -> None:
    assert accepted_params(replace(PLAIN, **changes), VOCAB) == [said]


def test_every_refused_field_is_named() -> None:
    judged = accepted_params(replace(PLAIN, top_p=0.0, logprobs=-1, allowed_token_ids=(-1,)), VOCAB)
    assert isinstance(judged, list) and [problem.field for problem in judged] == ["top_p", "logprobs", "allowed_token_ids"]
