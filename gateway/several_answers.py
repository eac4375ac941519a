"""Several answers to one prompt: requests of their own, which share the prompt's KV."""

from dataclasses import replace

from tessera.values.identity import new_request_id
from tessera.values.request import Submission
from tessera.values.sampling import SEED_MAX

ANSWERS_MAX = 16


def all_answers(only: Submission, count: int) -> list[Submission]:
    """The requests for `count` answers, where `only` is that for the only one."""
    if count == 1:
        return [only]
    first = replace(only, fork_of=only.request_id)
    return [first, *_other_answers(first, count)]


def _other_answers(first: Submission, count: int) -> list[Submission]:
    """The requests for answers 1 to `count` - 1, where `first` is that for answer 0. Answer i is that of the seed plus i, beyond SEED_MAX
    from 0 on again, as if asked for alone; what the prompt's log-probabilities are comes with answer 0."""
    return [
        replace(
            first,
            request_id=new_request_id(),
            client_request_id=answer_id(first.client_request_id, index),
            sampling=replace(first.sampling, seed=(first.sampling.seed + index) % (SEED_MAX + 1), prompt_logprobs=None),
            fork_of=first.request_id,
        )
        for index in range(1, count)
    ]


def answer_id(client_request_id: str, index: int) -> str:
    """Under which name answer `index` lives beside what its client calls `client_request_id`."""
    return f"{client_request_id}\x1f{index}" if index else client_request_id
