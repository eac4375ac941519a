"""What a client says to go on with an answer that was begun earlier, and whether it can be so."""

from dataclasses import dataclass

import numpy as np

from gateway.errors import InvalidField, InvalidRequest
from gateway.generate_input import GenerateInput
from gateway.output_stream import Shown
from gateway.prompt import check_token_ids
from gateway.served_model import ServedModel
from gateway.validation import validate
from tessera.values.request import Submission

RESUME_NUMBER_MAX = 2**31 - 1

GENERATION = "generation."
"""Where the fields that `validate` names stand in a request that can be a resume."""


@dataclass(frozen=True, slots=True, eq=False)
class ResumeInput:
    """As a client gives it, unchecked: the resume's number, and how many tokens and bytes of text (UTF-8) it has received. `token_ids`
    (any integer dtype, `[n]`) are these tokens, or none."""

    number: int
    token_offset: int
    text_offset: int
    token_ids: np.ndarray


@dataclass(frozen=True, slots=True)
class Resumed:
    """A checked resume. Whether `shown` is of the answer shows when that is there."""

    submission: Submission
    number: int
    shown: Shown


def validate_resume(request: GenerateInput, resume: ResumeInput, model: ServedModel, principal: str) -> Resumed:
    """The resume that the two stand for. Raises InvalidRequest naming every refused field by its path from the whole request on."""
    problems = _problems(resume, model.info.vocab_size)
    if not request.request_id:
        problems.append(InvalidField(f"{GENERATION}request_id", "is missing; a resume names the request that it goes on with"))
    if request.n > 1:
        problems.append(InvalidField(f"{GENERATION}n", f"is {request.n}; only a single answer can be resumed"))
    submission = None
    try:
        submission = validate(request, model, principal)
    except InvalidRequest as error:
        problems.extend(error.under(GENERATION).fields)
    if submission is not None:
        most = min(submission.sampling.max_tokens, model.info.max_model_len - len(submission.prompt_token_ids))
        if resume.token_offset > most:
            text = f"is {resume.token_offset}; the answer has at most {most} tokens by max_tokens and the model's length"
            problems.append(InvalidField("resume.token_offset", text))
    if problems or submission is None:
        raise InvalidRequest(problems)
    return Resumed(submission, resume.number, Shown(resume.token_offset, resume.text_offset, tuple(resume.token_ids.tolist())))


def _problems(resume: ResumeInput, vocab_size: int) -> list[InvalidField]:
    problems = check_token_ids("resume.token_ids", resume.token_ids, vocab_size)
    if not 1 <= resume.number <= RESUME_NUMBER_MAX:
        problems.append(InvalidField("resume.number", f"must be between 1 and {RESUME_NUMBER_MAX}, got {resume.number}"))
    count = len(resume.token_ids)
    if count and count != resume.token_offset:
        problems.append(
            InvalidField("resume.token_ids", f"has {count} ids, token_offset is {resume.token_offset}; give all or none")
        )
    return problems
