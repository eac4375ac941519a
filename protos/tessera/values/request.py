"""A request as it travels inside the service: what was asked, and what has come of it."""

from dataclasses import dataclass, field

import numpy as np

from tessera.values.finish import Finish
from tessera.values.logprobs import Logprobs
from tessera.values.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class DetokenizeOptions:
    """What a gateway needs to turn tokens into text; journalled, so that any gateway can go on with it."""

    stop_strings: tuple[str, ...] = ()
    include_stop_in_output: bool = False
    skip_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """How long a request may take, milliseconds from its arrival at the scheduler; 0: as long as it takes. Whichever is over first ends it.

    - `max_queue_ms`: until it is first scheduled. `max_first_token_ms`: until its first output token.
    - `max_total_ms`: until its end. `deadline_ms`: the same, from the deadline of its client's call, so another at every try.
    """

    max_queue_ms: int = 0
    max_first_token_ms: int = 0
    max_total_ms: int = 0
    deadline_ms: int = 0


@dataclass(frozen=True, slots=True)
class Submission:
    """One request as a gateway submits it and the journal keeps it. Never mutated.

    `prompt_token_ids` is int32 `[prompt_len]`, prompt_len >= 1, every id below the vocabulary size.
    `request_id` is the internal id (16 bytes); `client_request_id` is the client's own, unique per principal while it lives.

    - `priority`: the lower number goes first where the queue's order is by priority; equal ones in the order of arrival.
    - `cache_salt`: the tenant's part of the namespace of its prefixes. Only requests of the same salt share cached blocks; empty is a
      namespace like any other.
    - `max_model_length`: the request's own cap on prompt and output together, tokens; 0: none but the model's and the pool's.
    - `fork_of`: internal id of the request, no fork itself, whose prompt this one shares, so that it can share its blocks as well; its own
      id: it is the one whose prompt others share; empty: it is alone. To the tokens a hint: without it, or where that request is gone, they
      are the same.
    - `is_seed_given`: the seed is the client's own, not one that its gateway drew.
    - `limits`: None where it has none.
    - `trace_context`: the span of its client's call, which the spans of all other processes have as their parent, in a form that only
      these read; empty: it is not traced.
    """

    request_id: bytes
    prompt_token_ids: np.ndarray
    sampling: SamplingParams
    detokenize: DetokenizeOptions = field(default_factory=DetokenizeOptions)
    client_request_id: str = ""
    principal: str = ""
    priority: int = 0
    cache_salt: str = ""
    max_model_length: int = 0
    fork_of: bytes = b""
    is_seed_given: bool = False
    limits: TimeLimits | None = None
    trace_context: str = ""

    @property
    def is_one_of_several(self) -> bool:
        """Whether it is one of several answers to one prompt, which nobody resumes."""
        return bool(self.fork_of)


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """Durations in microseconds on the scheduler's clock, 0 where the phase was not reached, and what stretched them.

    From arrival: `queue_us` to the first admission, `ttft_us` to the first output token, `total_us` to the end. So the first prefill takes
    `ttft_us - queue_us`, and a token after the first one on average `(total_us - ttft_us) / (output_len - 1)` (TPOT).
    """

    queue_us: int = 0
    ttft_us: int = 0
    total_us: int = 0
    num_preemptions: int = 0  # how often it lost its KV, or was swapped out, so that others could go on


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """Tokens of one request from an absolute offset on, and its end if it has ended (ATOM's `RequestOutput`).

    `subscriber` is the client's resume number that this output is for (a Submit is 0). A receiver that holds
    more than `token_offset` tokens already drops the duplicates; `token_offset` above what it holds is a gap, a bug.
    """

    request_id: bytes
    subscriber: int
    token_offset: int
    token_ids: tuple[int, ...]
    num_cached_tokens: int = 0
    finish: Finish | None = None
    timings: RequestTimings | None = None  # set with `finish`
    logprobs: Logprobs | None = None  # of these tokens; None where the request wants none, or all were lost
    prompt_logprobs: Logprobs | None = None  # of every prompt token but the first, with the first output token
