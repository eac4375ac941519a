"""What is let in: one formula for the validator, which refuses what never fits, and for the admitter, which waits until it does."""

from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from tessera.values.config import Config
from tessera.values.model import KVGeometry, ModelInfo
from tessera.values.request import Submission, TimeLimits

RETRY_AFTER_MS = 1000
"""When a refused client should try again: about the length of a short answer, so that the queue has moved."""

RESUMES_QUEUED_FACTOR = 4
"""A request that had begun, and that everybody but its client has lost, is taken in beyond the queue's limits, but not beyond so many times
them: what ran and waited before is then taken back, and a client that resumes what never was cannot fill the memory."""


class RefusalReason(Enum):
    """Why a submission was not admitted."""

    TOO_LONG = "too_long"  # can never run here
    OVERLOADED = "overloaded"  # the queue is full
    ALREADY_EXISTS = "already_exists"  # the id lives with another body or principal
    PAUSED = "paused"  # an operator wants no new requests
    NO_WORKER = "no_worker"  # no worker has been attached yet, so nobody knows what fits


@dataclass(frozen=True, slots=True)
class Admitted:
    """A new request; `Sequence.finish` may be set already, when the tokens received end it."""

    request_id: bytes


@dataclass(frozen=True, slots=True)
class Known:
    """The request lives, or has ended not long ago. `request_id` differs from the one submitted where the client's own id
    named it; `subscriber` is the highest seen, another may own the request now."""

    request_id: bytes
    subscriber: int


@dataclass(frozen=True, slots=True)
class Unknown:
    """No such request: the gateway may submit it again, with the tokens it holds."""

    request_id: bytes


@dataclass(frozen=True, slots=True)
class Refused:
    """Not admitted, nothing changed. `message` names the numbers; `retry_after_ms` is 0 where trying again never helps."""

    reason: RefusalReason
    message: str
    retry_after_ms: int = 0


PAUSED = Refused(
    RefusalReason.PAUSED, "an operator has paused the admission of new requests; those that run go on", RETRY_AFTER_MS
)


def request_len_max(model: ModelInfo, geometry: KVGeometry) -> int:
    """The longest request, prompt and output in tokens, that can run: the last token needs a place in the context, but no KV."""
    return min(model.max_model_len, geometry.num_tokens + 1)


def positions_reserved(num_tokens: int, tokens_max: int) -> int:
    """Positions that must have blocks before a sequence of `num_tokens` tokens is admitted: all of them and the first decode
    position, but never more than a request that ends at `tokens_max` tokens can use (its last token is not computed)."""
    return min(num_tokens + 1, tokens_max - 1)


def resume_watermark(num_blocks: int) -> int:
    """Blocks that must stay free when a sequence that ran before is admitted beside running ones: 1 % of the pool, at least 1.

    Without it the next block anybody needs would send it back at once.
    """
    return max(1, num_blocks // 100)


def too_long(prompt_len: int, own_len_max: int, len_max: int, whole_prompt_max: int | None) -> Refused | None:
    """Refuse a prompt that can never run: it leaves no room for one output token, or must be computed in one step and does not fit one.

    `own_len_max` is the request's `max_model_length`, 0 where it has none, `len_max` what the model and the largest pool take;
    `whole_prompt_max` is the budget of a step where prompts are not chunked, else None.
    """
    if 0 < own_len_max <= prompt_len:
        return Refused(
            RefusalReason.TOO_LONG,
            f"the prompt has {prompt_len} tokens; its max_model_length of {own_len_max}, prompt and output, leaves none for the output",
        )
    if prompt_len >= len_max:
        return Refused(
            RefusalReason.TOO_LONG,
            f"the prompt has {prompt_len} tokens; at most {len_max - 1} fit, one of {len_max} is kept for the output",
        )
    if whole_prompt_max is not None and prompt_len > whole_prompt_max:
        return Refused(
            RefusalReason.TOO_LONG,
            f"the prompt has {prompt_len} tokens; without chunked prefill at most {whole_prompt_max} fit one step",
        )
    return None


def queue_full(prompt_len: int, num_queued: int, tokens_queued: int, config: Config, has_begun: bool) -> Refused | None:
    """Refuse a request for which the queue has no place. For one that had begun its limits are wider: nothing in flight is lost."""
    factor = RESUMES_QUEUED_FACTOR if has_begun else 1
    requests_max, tokens_max = factor * config.max_queued_requests, factor * config.max_queued_tokens
    if num_queued >= requests_max:
        message = f"{num_queued} requests are queued, at most {requests_max} may be"
        return Refused(RefusalReason.OVERLOADED, message, RETRY_AFTER_MS)
    if num_queued and tokens_queued + prompt_len > tokens_max:
        message = f"{tokens_queued} tokens are queued, with these {prompt_len} they would be more than {tokens_max}"
        return Refused(RefusalReason.OVERLOADED, message, RETRY_AFTER_MS)
    return None


def same_body(one: Submission, other: Submission) -> bool:
    """Whether a client asked for the same again, stop strings and text options included. Seeds may differ unless the client gave both: its
    gateway draws one for every try of a client that gives none. The seed of the request that is known counts. The deadline of the call may
    differ too. Neither is one of several answers."""
    if one.is_seed_given and other.is_seed_given and one.sampling.seed != other.sampling.seed:
        return False
    return (
        np.array_equal(one.prompt_token_ids, other.prompt_token_ids)
        and replace(one.sampling, seed=0) == replace(other.sampling, seed=0)
        and one.detokenize == other.detokenize
        and _own_limits(one) == _own_limits(other)
        and (one.priority, one.cache_salt, one.max_model_length) == (other.priority, other.cache_salt, other.max_model_length)
    )


def _own_limits(submission: Submission) -> TimeLimits:
    """Those that are not of its client's call."""
    return replace(submission.limits or TimeLimits(), deadline_ms=0)
