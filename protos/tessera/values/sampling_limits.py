"""The table of all sampling parameters: for every field, which values are accepted, clamped or refused.

Whoever takes requests in calls `accepted_params` once; everything behind relies on it. The table is printed in docs/sampling.md, with
what becomes of the values at its edges.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tessera.values.sampling import SEED_MAX, STOP_TOKEN_IDS_MAX, Limit, SamplingParams, plain_number

LOGPROBS_MAX = 20
LOGPROB_TOKEN_IDS_MAX = 128
LOGPROB_ENTRIES_MAX = 2**20
"""Of all tokens of a prompt together, and of all that an answer may have: they are kept, and sent, as long as the request lives."""
LOGIT_BIAS_MAX = 1024
ALLOWED_TOKEN_IDS_MAX = 1024
BAD_WORDS_MAX = 256
SEQUENCE_IDS_MAX = 32
"""Ids in one sequence: a bad word, or a stop token sequence."""
STOP_TOKEN_SEQUENCES_MAX = 16


@dataclass(frozen=True, slots=True)
class FieldProblem:
    """Why the value of one field is refused, for people."""

    field: str
    problem: str


@dataclass(frozen=True, slots=True)
class IdsLimit:
    """A list of token ids, each from 0 to below the vocabulary size; empty is off. `unique`: no id may come twice."""

    length_max: int
    meaning: str
    unique: bool = False

    def problem(self, token_ids: Sequence[int], vocab_size: int) -> str | None:
        """Why `token_ids` is refused; None when it is accepted."""
        if len(token_ids) > self.length_max:
            return f"has {len(token_ids)} ids; at most {self.length_max} are taken"
        wrong = next((token for token in token_ids if not 0 <= token < vocab_size), None)
        if wrong is not None:
            return f"has the id {wrong}; the vocabulary has 0 to {vocab_size - 1}"
        if self.unique and len(set(token_ids)) < len(token_ids):
            return f"has the id {Counter(token_ids).most_common(1)[0][0]} more than once"
        return None


@dataclass(frozen=True, slots=True)
class SequencesLimit:
    """A list of sequences of token ids, of 1 to `SEQUENCE_IDS_MAX` ids each; empty is off."""

    length_max: int
    meaning: str

    def problem(self, sequences: Sequence[Sequence[int]], vocab_size: int) -> str | None:
        """Why `sequences` is refused; None when it is accepted."""
        if len(sequences) > self.length_max:
            return f"has {len(sequences)} sequences; at most {self.length_max} are taken"
        for size in map(len, sequences):
            if not 1 <= size <= SEQUENCE_IDS_MAX:
                return f"has a sequence of {size} ids; 1 to {SEQUENCE_IDS_MAX} are taken"
        return IdsLimit(len(sequences) * SEQUENCE_IDS_MAX, "").problem(
            [token for sequence in sequences for token in sequence], vocab_size
        )


def logprob_entries_problem(num_tokens: int, entries_per_token: int) -> str | None:
    """Why log-probabilities of so many tokens are refused; None where they are accepted."""
    count = num_tokens * entries_per_token
    if count <= LOGPROB_ENTRIES_MAX:
        return None
    return f"would tell {entries_per_token} of each of {num_tokens} tokens, {count} together; at most {LOGPROB_ENTRIES_MAX} are told"


_PENALTY = "taken from the logit of every id that the output so far has; 0 is off, below 0 it is encouraged"
_TIMES = "taken as often as the output so far has the id; 0 is off"
_LOGPROBS = "0: of the token itself, N: of the N likeliest too; absent is off"

NUMBER_LIMITS: dict[str, Limit] = {
    "temperature": Limit(0.0, 100.0, 1.0, False, "0 is greedy"),
    "top_p": Limit(1e-6, 1.0, 1.0, False, "1 is off"),
    "top_k": Limit(-1, 2**31 - 1, 0, True, "0 or -1 is off; larger than the vocabulary is off"),
    "min_p": Limit(0.0, 1.0, 0.0, False, "0 is off"),
    "seed": Limit(0, SEED_MAX, None, True, "drawn at random when absent"),
    "max_tokens": Limit(1, 2**20, 64, True, "most output tokens"),
    "min_tokens": Limit(0, 2**20, 0, True, "EOS and stop token ids cannot come before; at most max_tokens"),
    "presence_penalty": Limit(-2.0, 2.0, 0.0, False, _PENALTY),
    "frequency_penalty": Limit(-2.0, 2.0, 0.0, False, _TIMES),
    "repetition_penalty": Limit(
        0.01, 100.0, 1.0, False, "divides a positive logit and multiplies another, of every id of prompt and output; 1 is off"
    ),
    "logprobs": Limit(0, LOGPROBS_MAX, None, True, _LOGPROBS),
    "prompt_logprobs": Limit(0, LOGPROBS_MAX, None, True, f"of every prompt token but the first; {_LOGPROBS}"),
}
"""Every field that is a number."""

BIAS_LIMIT = Limit(-100.0, 100.0, None, False, "added to the logit of its id, before the penalties", clamps=True)
"""One bias of `logit_bias`."""

LIST_LIMITS: dict[str, IdsLimit | SequencesLimit] = {
    "stop_token_ids": IdsLimit(STOP_TOKEN_IDS_MAX, "end the output, and belong to it"),
    "stop_token_sequences": SequencesLimit(STOP_TOKEN_SEQUENCES_MAX, "end the output, and belong to it"),
    "logit_bias": IdsLimit(LOGIT_BIAS_MAX, "ids with a bias each", unique=True),
    "allowed_token_ids": IdsLimit(ALLOWED_TOKEN_IDS_MAX, "all others are ruled out"),
    "bad_words_ids": SequencesLimit(
        BAD_WORDS_MAX, "the last id of each is ruled out where the output so far ends with those before it"
    ),
    "logprob_token_ids": IdsLimit(LOGPROB_TOKEN_IDS_MAX, "their log-probabilities come with every sampled token's"),
}
"""Every field that is a list; of `logit_bias`, the ids."""


def accepted_params(params: SamplingParams, vocab_size: int) -> SamplingParams | list[FieldProblem]:
    """`params` with what is clamped clamped, or why they are refused: one problem per field, in the order of the table."""
    problems = [*_number_problems(params), *_list_problems(params, vocab_size)]
    if problems:
        return problems
    if not params.logit_bias:
        return params
    return replace(params, logit_bias=tuple((token, BIAS_LIMIT.clamped(bias)) for token, bias in params.logit_bias))


def _number_problems(params: SamplingParams) -> list[FieldProblem]:
    values = {name: getattr(params, name) for name in NUMBER_LIMITS}
    found = {name: NUMBER_LIMITS[name].problem(value) for name, value in values.items() if value is not None}
    problems = [FieldProblem(name, problem) for name, problem in found.items() if problem is not None]
    if not problems and params.min_tokens > params.max_tokens:
        problems.append(FieldProblem("min_tokens", f"is {params.min_tokens}, above max_tokens, which is {params.max_tokens}"))
    return problems


def _list_problems(params: SamplingParams, vocab_size: int) -> list[FieldProblem]:
    problems = []
    for name, limit in LIST_LIMITS.items():
        value = getattr(params, name)
        if name == "logit_bias":
            problem = limit.problem([token for token, _ in value], vocab_size) or _bias_problem(value)
        else:
            problem = limit.problem(value, vocab_size)
        if problem is not None:
            problems.append(FieldProblem(name, problem))
    return problems


def _bias_problem(logit_bias: Sequence[tuple[int, float]]) -> str | None:
    for token, bias in logit_bias:
        problem = BIAS_LIMIT.problem(bias)
        if problem is not None:
            return f"of the id {token} {problem}"
    return None


def number_verdict(limit: Limit, value: float) -> str:
    """What becomes of one number, in the words of the document: accepted, clamped to a number, or refused."""
    if limit.problem(value) is not None:
        return "refused"
    taken = limit.clamped(value)
    return "accepted" if taken == value else f"clamped to {plain_number(taken)}"
