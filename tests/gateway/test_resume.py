"""A resume as a client gives it: what can be so, and every field that cannot."""

import numpy as np
import pytest

from gateway.errors import InvalidRequest
from gateway.generate_input import GenerateInput, SamplingInput
from gateway.output_stream import Shown
from gateway.resume import RESUME_NUMBER_MAX, ResumeInput, validate_resume
from gateway.served_model import ServedModel
from gateway.tokenizer import Tokenizer
from tessera.values.model import ModelInfo


@pytest.fixture
def model(byte_level: Tokenizer) -> ServedModel:
    info = ModelInfo("m", "LlamaForCausalLM", byte_level.vocab_size, 100, (2,), 1, byte_level.digest, "w" * 64)
    return ServedModel(info, byte_level)


def asked(request_id: str = "mine", **sampling: int) -> GenerateInput:
    return GenerateInput("abc", request_id=request_id, sampling=SamplingInput(**sampling))


def resume(number: int = 1, token_offset: int = 0, text_offset: int = 0, token_ids: tuple[int, ...] = ()) -> ResumeInput:
    return ResumeInput(number, token_offset, text_offset, np.array(token_ids, np.int64))


@pytest.mark.parametrize("token_ids", [(), (64, 65)])
def test_a_resume_says_what_was_shown(model: ServedModel, token_ids: tuple[int, ...]) -> None:
    resumed = validate_resume(asked(seed=7), resume(3, 2, 1, token_ids), model, "p")
    assert (resumed.number, resumed.shown) == (3, Shown(2, 1, token_ids))
    submission = resumed.submission
    assert (submission.client_request_id, submission.principal, submission.sampling.seed) == ("mine", "p", 7)


def test_all_of_an_answer_that_fills_the_model_may_have_been_shown(model: ServedModel) -> None:
    assert validate_resume(asked(max_tokens=1000), resume(1, 97), model, "p").shown.num_tokens == 97


@pytest.mark.parametrize(
    ("request_", "resume_", "fields"),
    [
        (asked(), resume(0), ["resume.number"]),
        (asked(), resume(RESUME_NUMBER_MAX + 1), ["resume.number"]),
        (asked(""), resume(), ["generation.request_id"]),
        (asked(), resume(1, 3, 0, (64, 65)), ["resume.token_ids"]),
        (asked(), resume(1, 0, 0, (64,)), ["resume.token_ids"]),
        (asked(), resume(1, 2, 0, (64, 100_000)), ["resume.token_ids[1]"]),
        (asked(max_tokens=4), resume(1, 5), ["resume.token_offset"]),
        (asked(max_tokens=1000), resume(1, 98), ["resume.token_offset"]),
        (asked("", top_k=-5), resume(0, 3, 0, (64, 9999)), [
            "resume.token_ids[1]", "resume.number", "resume.token_ids", "generation.request_id", "generation.sampling.top_k",
        ]),
    ],
)  # fmt: skip
def test_every_field_that_cannot_be_is_named(
    model: ServedModel, request_: GenerateInput, resume_: ResumeInput, fields: list[str]
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate_resume(request_, resume_, model, "")
    assert [item.field for item in caught.value.fields] == fields
