"""Which of a request's own tokens ends it, and where."""

from dataclasses import replace
from typing import Any

import pytest
from fake_worker import MODEL
from hypothesis import example, given
from hypothesis import strategies as st
from scheduler_rig import submission

from services.scheduler.core.stop_rules import StopRules, stop_string_wins
from tessera.values.finish import Finish, FinishReason
from tessera.values.sampling import SamplingParams

PROMPT = [30, 31, 32]
SAMPLING = SamplingParams(seed=0, max_tokens=10)


def stop(
    output: list[int], checked: int = 0, pool_len_max: int = 1000, model_len: int = 64, own_len: int = 0, **sampling: object
) -> Finish | None:
    request = submission(1, PROMPT, replace(SAMPLING, **sampling), max_model_length=own_len)
    rules = StopRules.of(request, replace(MODEL, max_model_len=model_len), pool_len_max)
    return rules.first_stop(output, checked)


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
        ([40, 41], {"max_tokens": 2, "stop_token_sequences": ((40, 41),)}, Finish(FinishReason.STOP_SEQUENCE, 2)),
        ([40, 41], {"max_tokens": 2, "stop_token_ids": (41,)}, Finish(FinishReason.STOP_TOKEN, 2, stop_token_id=41)),
        ([41], {"stop_token_ids": (41,), "stop_token_sequences": ((41,),)}, Finish(FinishReason.STOP_SEQUENCE, 1)),
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


@pytest.mark.parametrize("eos_id", [2, 9])
def test_every_eos_id_of_the_model_ends_it_and_none_where_eos_is_ignored(eos_id: int) -> None:
    """Case 50: the model names 2 and 9. The request's own stop ids hold even then."""
    assert stop([40, eos_id]) == Finish(FinishReason.EOS, 2, stop_token_id=eos_id)
    assert stop([40, eos_id], ignore_eos=True) is None
    assert stop([40, eos_id], ignore_eos=True, stop_token_ids=(7, eos_id)) == Finish(
        FinishReason.STOP_TOKEN, 2, stop_token_id=eos_id
    )
    assert stop([eos_id, 40, eos_id], min_tokens=3) == Finish(FinishReason.EOS, 3, stop_token_id=eos_id)


def test_a_stop_sequence_may_come_in_pieces_and_overlap_itself() -> None:
    ends = {"stop_token_sequences": ((1, 1, 5),)}
    output = [1, 1, 1, 5, 40]
    for checked in range(4):
        assert stop(output[: checked + 1], checked, **ends) == (
            Finish(FinishReason.STOP_SEQUENCE, 4) if checked == 3 else None
        ), "one token a step"
    assert stop(output, 1, **ends) == Finish(FinishReason.STOP_SEQUENCE, 4), "begun in an earlier step"


def test_of_two_stop_sequences_that_overlap_the_one_complete_first_ends_it() -> None:
    assert stop([40, 41, 42, 43], stop_token_sequences=((40, 41, 42, 43), (41, 42))) == Finish(FinishReason.STOP_SEQUENCE, 3)


def test_a_requests_own_cap_counts_prompt_and_output() -> None:
    assert stop([40], own_len=5) is None
    assert stop([40, 41], own_len=5) == Finish(FinishReason.MAX_MODEL_LEN, 2)
    assert stop([40, 41, 42, 43], own_len=5) == Finish(FinishReason.MAX_MODEL_LEN, 2), "the rest is cut"
    assert stop([40, 41], own_len=5, min_tokens=3) == Finish(FinishReason.MAX_MODEL_LEN, 2), "caps beat min_tokens"
    assert stop([40, 41], own_len=5, max_tokens=2) == Finish(FinishReason.MAX_TOKENS, 2)
    assert stop([40, 2], own_len=5) == Finish(FinishReason.EOS, 2, stop_token_id=2)
    assert stop([40, 41], own_len=7, model_len=5) == Finish(FinishReason.MAX_MODEL_LEN, 2), "no request outgrows the model"


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


SMALL_IDS = st.integers(1, 4)
SAMPLINGS = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 9),
        "min_tokens": st.integers(0, 6),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.lists(SMALL_IDS, max_size=1).map(tuple),
        "stop_token_sequences": st.lists(st.lists(SMALL_IDS, min_size=1, max_size=3).map(tuple), max_size=2).map(tuple),
        "own_len": st.sampled_from([0, 4, 7, 9]),
    }
)


@given(st.lists(SMALL_IDS, min_size=1, max_size=14), st.lists(st.integers(1, 4), min_size=14, max_size=14), SAMPLINGS)
@example([1, 1, 1, 3], [2, 2] + [1] * 12, {"stop_token_sequences": ((1, 1, 3),)})
@example([3, 2, 3, 4], [4] + [1] * 13, {"max_tokens": 2, "min_tokens": 4})
def test_where_it_ends_does_not_depend_on_how_many_tokens_a_step_brings(
    output: list[int], steps: list[int], given_rules: dict[str, object]
) -> None:
    """Case 41 and its like: the rules look at a step of 1 to 4 tokens; a plain reading of the rules, token by token, says the same."""
    expected = next((finish for end in range(1, len(output) + 1) if (finish := read_plainly(output[:end], given_rules))), None)
    found, checked = None, 0
    for count in steps:
        if found is not None or checked == len(output):
            break
        shown = output[: checked + count]
        found = stop(shown, checked, **given_rules)
        checked = len(shown)
    assert found == expected == stop(output, **given_rules)


def read_plainly(output: list[int], given_rules: dict[str, Any]) -> Finish | None:
    """What ends a request that has gone on until now."""
    sampling, count = replace(SAMPLING, **{k: v for k, v in given_rules.items() if k != "own_len"}), len(output)
    last = output[-1]
    if count >= sampling.min_tokens:
        if any(tuple(output[-len(ids) :]) == ids for ids in sampling.stop_token_sequences):
            return Finish(FinishReason.STOP_SEQUENCE, count)
        if last in (2, 9) and not sampling.ignore_eos:
            return Finish(FinishReason.EOS, count, stop_token_id=last)
        if last in sampling.stop_token_ids:
            return Finish(FinishReason.STOP_TOKEN, count, stop_token_id=last)
    if count == sampling.max_tokens:
        return Finish(FinishReason.MAX_TOKENS, count)
    return Finish(FinishReason.MAX_MODEL_LEN, count) if len(PROMPT) + count == given_rules.get("own_len") else None
