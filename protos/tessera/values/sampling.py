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


@dataclass(frozen=True, slots=True)
class Limit:
    """Inclusive range of one field; `integer` fields refuse fractions; NaN and infinities are always refused."""

    minimum: float
    maximum: float
    default: float | None
    integer: bool
    meaning: str

    def problem(self, value: float) -> str | None:
        """Why `value` is refused, for people; None when it is accepted."""
        if not math.isfinite(value):
            return f"must be a finite number, got {value}"
        if self.integer and value != int(value):
            return f"must be a whole number, got {value}"
        if not self.minimum <= value <= self.maximum:
            return f"must be between {_plain(self.minimum)} and {_plain(self.maximum)}, got {_plain(value)}"
        return None


def _plain(value: float) -> str:
    """Every digit, since a limit and the value beyond it may differ in the last one only; whole numbers without a fraction."""
    return str(int(value)) if value == int(value) else repr(float(value))


LIMITS: dict[str, Limit] = {
    "temperature": Limit(0.0, 100.0, 1.0, False, "0 is greedy"),
    "top_p": Limit(1e-6, 1.0, 1.0, False, "1 is off"),
    "top_k": Limit(-1, 2**31 - 1, 0, True, "0 or -1 is off; larger than the vocabulary is off"),
    "min_p": Limit(0.0, 1.0, 0.0, False, "0 is off"),
    "seed": Limit(0, SEED_MAX, None, True, "drawn at random when absent"),
    "max_tokens": Limit(1, 2**20, 64, True, "most output tokens"),
    "min_tokens": Limit(0, 2**20, 0, True, "EOS and stop token ids cannot come before; at most max_tokens"),
}
"""Accepted values per numeric field of `SamplingParams`; the gateway refuses the rest, the worker relies on it."""

STOP_STRINGS_MAX = 16
STOP_STRING_BYTES_MAX = 1024
STOP_TOKEN_IDS_MAX = 64
