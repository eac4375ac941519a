"""Which of a request's own tokens ends it, and where."""

from dataclasses import replace

import pytest
from fake_worker import MODEL
from scheduler_rig import submission

from services.scheduler.core.stop_rules import StopRules, stop_string_wins
from tessera.values.finish import Finish, FinishReason
from tessera.values.sampling import SamplingParams

PROMPT = [30, 31, 32]
SAMPLING = SamplingParams(seed=0, max_tokens=10)


def stop(
    output: list[int], checked: int = 0, pool_len_max: int = 1000, model_len: int = 64, **sampling: object
) -> Finish | None:
    request = submission(1, PROMPT, replace(SAMPLING, **sampling))
    rules = StopRules.of(request, replace(MODEL, max_model_len=model_len), pool_len_max)
    return rules.first_stop(PROMPT + output, checked)


@pytest.mark.parametrize(
    ("output", "sampling", "expected"),
    [
        ([40], {}, None),
        ([40, 2], {}, Finish(FinishReason.EOS, 2, stop_token_id=2)),
        ([40, 9], {}, Finish(FinishReason.EOS, 2, stop_token_id=9)),
        ([40, 9], {"ignore_eos": True}, None),
        ([9], {"ignore_eos": True, "stop_token_ids": (9,)}, Finish(FinishReason.STOP_TOKEN, 1, stop_token_id=9)),
        ([9], {"stop_token_ids": (9,)}, Finish(FinishReason.EOS, 1, stop_token_id=9)),
        ([40, 41], {"stop_token_sequences": ((40, 41),)}, Finish(FinishReason.STOP_SEQUENCE, 2)),
        ([41], {"stop_token_sequences": ((32, 41),)}, None),  # only output counts, not the prompt's end
        ([41, 2], {"stop_token_sequences": ((41, 2),)}, Finish(FinishReason.STOP_SEQUENCE, 2)),
        ([40, 41], {"max_tokens": 2}, Finish(FinishReason.MAX_TOKENS, 2)),
        ([40, 2], {"max_tokens": 2}, Finish(FinishReason.EOS, 2, stop_token_id=2)),
    ],
)
def test_the_first_rule_that_holds_ends_it(output: list[int], sampling: dict[str, object], expected: Finish | None) -> None:
    assert stop(output, **sampling) == expected


def test_label_of_a_stop_token_is_atoms() -> None:
    finish = stop([17], stop_token_ids=(17,))
    assert finish is not None and finish.label == "stop_17"


def test_the_earliest_stop_wins_and_the_rest_is_cut() -> None:
    assert stop([40, 2, 41, 9]) == Finish(FinishReason.EOS, 2, stop_token_id=2)
    assert stop([40] * 12) == Finish(FinishReason.MAX_TOKENS, 10)


def test_tokens_checked_before_are_not_checked_again() -> None:
    assert stop([40, 2, 41], checked=2) is None
    assert stop([40, 2, 41, 9], checked=2) == Finish(FinishReason.EOS, 4, stop_token_id=9)


def test_min_tokens_holds_back_all_rules_but_caps() -> None:
    held_back = {"min_tokens": 3, "stop_token_ids": (40,), "stop_token_sequences": ((40,),)}
    assert stop([40, 2], **held_back) is None
    assert stop([40, 41, 40], **held_back) == Finish(FinishReason.STOP_SEQUENCE, 3)
    assert stop([40, 41], min_tokens=3, max_tokens=2) == Finish(FinishReason.MAX_TOKENS, 2)
    assert stop([40, 41], min_tokens=3, model_len=5) == Finish(FinishReason.MAX_MODEL_LEN, 2)


def test_length_caps_count_prompt_and_output() -> None:
    assert stop([40], model_len=5) is None
    assert stop([40, 41], model_len=5) == Finish(FinishReason.MAX_MODEL_LEN, 2)
    assert stop([40, 41], max_tokens=2, model_len=5) == Finish(FinishReason.MAX_TOKENS, 2)


def test_the_pool_ends_a_request_where_it_stands() -> None:
    assert stop([40, 41], pool_len_max=6) is None
    assert stop([40, 41, 42], pool_len_max=6) == Finish(FinishReason.MAX_MODEL_LEN, 3)
    assert stop([40, 41, 42, 43], pool_len_max=6) == Finish(FinishReason.MAX_MODEL_LEN, 4), "shown tokens are never cut"


def test_a_prompt_that_the_pool_cannot_hold_any_more_is_unschedulable() -> None:
    finish = stop([], pool_len_max=3)
    assert finish is not None and finish.reason is FinishReason.UNSCHEDULABLE
    assert "3 tokens" in finish.message and "2" in finish.message


@pytest.mark.parametrize(
    ("output_len", "found", "wins"),
    [
        (3, Finish(FinishReason.EOS, 4), True),
        (4, Finish(FinishReason.EOS, 4), False),
        (5, Finish(FinishReason.EOS, 4), False),
        (4, Finish(FinishReason.MAX_TOKENS, 4), True),
        (4, Finish(FinishReason.MAX_MODEL_LEN, 4), True),
        (4, Finish(FinishReason.STOP_STRING, 4), False),
        (3, Finish(FinishReason.STOP_STRING, 4), True),
        (1, Finish(FinishReason.ABORTED, 4), False),
        (1, Finish(FinishReason.ERROR, 4), False),
    ],
)
def test_a_stop_string_against_a_finish_found_first(output_len: int, found: Finish, wins: bool) -> None:
    assert stop_string_wins(output_len, found) is wins
