"""Sampling parameters, and the one table that says which values are accepted."""

import math
from dataclasses import dataclass

SEED_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the output of one request is drawn and when it stops.

    A sampled token depends on (logits, `seed`, output index) alone. The gateway draws `seed` where the
    client gives none, so everything behind the gateway sees a resolved number.
    """

    seed: int
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # 1 is off
    top_k: int = 0  # 0 or -1 is off
    min_p: float = 0.0  # 0 is off
    max_tokens: int = 64
    min_tokens: int = 0  # EOS and stop token ids are masked until this many output tokens exist
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop_token_sequences: tuple[tuple[int, ...], ...] = ()
    presence_penalty: float = 0.0  # taken from the logit of every id that the output has; 0 is off
    frequency_penalty: float = 0.0  # the same, once for each time that it is there; 0 is off
    repetition_penalty: float = 1.0  # divides a positive logit, multiplies another, of every id of prompt and output; 1 is off
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    allowed_token_ids: tuple[int, ...] = ()  # all others are ruled out; empty is off
    bad_words_ids: tuple[
        tuple[int, ...], ...
    ] = ()  # the last id of each is ruled out where the output ends with those before it
    logprobs: int | None = None  # None is off, 0 tells of the sampled token alone, N also of the N likeliest
    prompt_logprobs: int | None = None  # the same for every prompt token but the first
    logprob_token_ids: tuple[int, ...] = ()  # whose log-probabilities come beside the sampled token's, with `logprobs` None too

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities go with every sampled token."""
        return self.logprobs is not None or bool(self.logprob_token_ids)


@dataclass(frozen=True, slots=True)
class Limit:
    """Inclusive range of one field; `integer` fields refuse fractions; NaN and infinities are always refused.

    A finite value beyond the range is refused, or taken as the nearer end of it where the field `clamps`.
    """

    minimum: float
    maximum: float
    default: float | None
    integer: bool
    meaning: str
    clamps: bool = False

    def problem(self, value: float) -> str | None:
        """Why `value` is refused, for people; None when it is accepted."""
        if not math.isfinite(value):
            return f"must be a finite number, got {value}"
        if self.integer and value != int(value):
            return f"must be a whole number, got {value}"
        if not self.clamps and not self.minimum <= value <= self.maximum:
            return f"must be between {plain_number(self.minimum)} and {plain_number(self.maximum)}, got {plain_number(value)}"
        return None

    def clamped(self, value: float) -> float:
        """What an accepted value is taken as."""
        return min(max(value, self.minimum), self.maximum)


def plain_number(value: float) -> str:
    """Every digit, since a limit and the value beyond it may differ in the last one only; whole numbers without a fraction."""
    return str(int(value)) if value == int(value) else repr(float(value))


STOP_STRINGS_MAX = 16
STOP_STRING_BYTES_MAX = 1024
STOP_TOKEN_IDS_MAX = 64
