"""What a client asks for, as plain values: the public request before anything about it has been checked."""

from dataclasses import dataclass, field

import numpy as np

from gateway.conversation import Conversation

Prompt = str | Conversation | np.ndarray
"""Plain text, a conversation, or token ids (any integer dtype, `[n]`)."""


@dataclass(frozen=True, slots=True)
class SamplingInput:
    """`SamplingParams` as a client gives them: None takes the default of the limits table."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LimitsInput:
    """`TimeLimits` as a client gives them; `deadline_ms` is what is left of its call."""

    max_queue_ms: int | None = None
    max_first_token_ms: int | None = None
    max_total_ms: int | None = None
    deadline_ms: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class GenerateInput:
    """One generation as asked. An empty `model` means the only one served; an empty `request_id` that the client has none. See
    `Submission` for `priority` and `cache_salt`."""

    prompt: Prompt | None
    model: str = ""
    request_id: str = ""
    sampling: SamplingInput = field(default_factory=SamplingInput)
    stop: tuple[str, ...] = ()
    include_stop_in_output: bool = False
    skip_special_tokens: bool = True
    priority: int = 0
    cache_salt: str = ""
    limits: LimitsInput = field(default_factory=LimitsInput)
    n: int = 1
