"""What clients ask for, and what they must get: the answer of an undisturbed run, computed token by token."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gateway.delta import Delta
from gateway.output_stream import OutputStream
from tessera.values.finish import Finish
from tessera.values.logprobs import joined_logprobs, no_logprobs
from tessera.values.request import DetokenizeOptions, RequestOutput, Submission
from tessera.values.sampling import SamplingParams
from tests.services.scheduler.core.fake_logprobs import expected_logprobs
from tests.services.scheduler.core.fake_worker import MODEL, prefix_digests, reference_output

ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ012345é☃ 678"


class SimTokenizer:
    """A character a token, some of them of several bytes: as much of a tokenizer as a gateway's session needs."""

    digest = MODEL.tokenizer_digest
    vocab_size = MODEL.vocab_size

    def detokenizer(self, skip_special_tokens: bool) -> "SimTokenizer":
        return self

    def step(self, token_id: int) -> str:
        return ALPHABET[token_id]

    def finish(self) -> str:
        return ""

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool) -> str:
        return text_of(token_ids)


def text_of(token_ids: Iterable[int]) -> str:
    """All of it, stop strings or not."""
    return "".join(ALPHABET[token_id] for token_id in token_ids)


@dataclass(frozen=True)
class Ask:
    """One request as a client has it."""

    client_request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    detokenize: DetokenizeOptions

    def submission(self, request_id: bytes) -> Submission:
        return Submission(
            request_id, np.array(self.prompt, np.int32), self.sampling, self.detokenize, self.client_request_id, "someone"
        )


@dataclass
class Answer:
    """Output ids, text and end."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: Finish | None = None


def model_output(ask: Ask, pool_tokens: int) -> tuple[list[int], Finish | None]:
    """Output ids and end as far as schedulers and workers can see."""
    return reference_output(ask.submission(bytes(16)), pool_tokens)


def expected_answer(ask: Ask, pool_tokens: int) -> Answer:
    """What a client of an undisturbed run is given."""
    submission = ask.submission(bytes(16))
    tokens, finish = model_output(ask, pool_tokens)
    stream = OutputStream(SimTokenizer(), ask.detokenize)  # type: ignore[arg-type]
    answer = Answer()
    for offset, token_id in enumerate(tokens):
        is_last = offset == len(tokens) - 1
        delta = stream.feed(RequestOutput(submission.request_id, 0, offset, (token_id,), finish=finish if is_last else None))
        if delta is not None:
            answer.token_ids += delta.token_ids
            answer.text += delta.text
            answer.finish = delta.finish
        if answer.finish is not None:
            break
    return answer


LOGPROBS: tuple[dict[str, Any], ...] = (
    {"logprobs": 1, "prompt_logprobs": 0},
    {},
    {"logprob_token_ids": (3, 60)},
    {"prompt_logprobs": 2},
)


def with_logprobs(ask: Ask, number: int) -> Ask:
    """Most ask for some, in one way or another."""
    return replace(ask, sampling=replace(ask.sampling, **LOGPROBS[number % len(LOGPROBS)]))


def num_untold(ask: Ask, token_ids: list[int], delta: Delta) -> int | None:
    """How many tokens of a delta, the last of an answer with these tokens so far, have no log-probabilities and should, those of the prompt
    counting as one; None where they have others than their own."""
    submission = ask.submission(bytes(16))
    output, prompt = expected_logprobs(submission, token_ids, prefix_digests([*ask.prompt, *token_ids]))
    found = delta.logprobs or no_logprobs(len(delta.token_ids))
    pairs = list(zip(found.split([1] * len(found)), output[delta.token_offset :], strict=True))
    if delta.prompt_logprobs is not None:
        pairs.append((delta.prompt_logprobs, joined_logprobs([no_logprobs(0), *prompt])))
    elif submission.sampling.prompt_logprobs is not None and delta.token_ids and not delta.token_offset:
        pairs.append((no_logprobs(0), no_logprobs(1)))
    missing = [mine != right and not mine.counts.any() for mine, right in pairs]
    is_own = all(mine == right or is_missing for (mine, right), is_missing in zip(pairs, missing, strict=True))
    return sum(missing) if is_own else None


def draw_prompts(rng: random.Random) -> list[list[int]]:
    """A few beginnings, some of which begin like others."""
    stem = [rng.randrange(64) for _ in range(16)]
    return [stem, stem[:8] + [rng.randrange(64) for _ in range(8)], [rng.randrange(64) for _ in range(12)]]


def draw_ask(rng: random.Random, number: int, beginnings: list[list[int]]) -> Ask:
    """A request that most often shares the beginning of its prompt with others."""
    prompt = list(rng.choice(beginnings)) + [rng.randrange(4) for _ in range(rng.choice((1, 1, 2, 5)))]
    if rng.random() < 0.2:
        del prompt[rng.randrange(1, len(prompt)) :]
    stops = tuple(rng.sample(ALPHABET, 2)) if rng.random() < 0.2 else ()
    if rng.random() < 0.1:
        stops += ("".join(rng.sample(ALPHABET, 2)),)
    max_tokens = rng.choice((3, 8, 16, 24, 40))
    sampling = SamplingParams(
        seed=rng.randrange(8),
        max_tokens=max_tokens,
        min_tokens=min(max_tokens, rng.choice((0, 0, 8))),
        ignore_eos=rng.random() < 0.7,
        stop_token_ids=(rng.randrange(64),) if rng.random() < 0.15 else (),
        stop_token_sequences=((rng.randrange(64),),) if rng.random() < 0.15 else (),
    )
    return Ask(f"ask-{number}", tuple(prompt), sampling, DetokenizeOptions(stop_strings=stops))
