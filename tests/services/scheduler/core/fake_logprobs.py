"""Log-probabilities that a deterministic worker makes up: a function of the ids before a token, so that everybody knows the right ones."""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from tessera.values.logprobs import Logprobs, no_logprobs
from tessera.values.request import Submission
from tessera.values.sampling import SamplingParams


def logprobs_behind(digest: int, token_id: int, num_top: int, asked: Sequence[int]) -> Logprobs:
    """Those of one token behind ids with this digest."""
    token_ids = [token_id, *range(num_top), *asked]
    values = [_value(digest, one) for one in token_ids]
    count, rank = np.array([len(token_ids)], np.int32), np.array([1 + token_id], np.int32)
    return Logprobs(count, np.array(token_ids, np.int32), np.array(values, np.float32), rank)


def sampled_logprobs(digest: int, token_id: int, sampling: SamplingParams) -> Logprobs:
    """Those of an output token, as its request wants them."""
    if not sampling.wants_logprobs:
        return no_logprobs(1)
    return logprobs_behind(digest, token_id, sampling.logprobs or 0, sampling.logprob_token_ids)


def expected_logprobs(
    submission: Submission, output: Sequence[int], digests: Sequence[int]
) -> tuple[list[Logprobs], list[Logprobs]]:
    """Of each output token, and of each prompt token but the first; `digests` are of every prefix of prompt and output."""
    sampling, prompt = submission.sampling, submission.prompt_token_ids.tolist()
    of_output = [sampled_logprobs(digests[len(prompt) + at - 1], token_id, sampling) for at, token_id in enumerate(output)]
    if sampling.prompt_logprobs is None:
        return of_output, []
    of_prompt = [
        logprobs_behind(digests[at - 1], token_id, sampling.prompt_logprobs, ()) for at, token_id in enumerate(prompt) if at
    ]
    return of_output, of_prompt


def _value(digest: int, token_id: int) -> float:
    raw = blake2b(digest.to_bytes(8, "little") + token_id.to_bytes(8, "little"), digest_size=2, person=b"logprob").digest()
    return -int.from_bytes(raw, "little") / 4096
