"""How long requests wait and steps take, as histograms: what dashboards show. Counted once per step, first token and end.

Bounds, and what is measured from where to where, are those of vLLM's metrics, so that its dashboards fit.
"""

from collections import Counter
from dataclasses import dataclass

from services.scheduler.core.histogram import Histogram
from services.scheduler.core.sequence import Sequence
from tessera.values.finish import FinishReason

FIRST_TOKEN_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
REQUEST_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))

PHASES = ("decode", "prefill", "mixed")
"""Of a step: next tokens of running requests alone, prompts alone, both."""


@dataclass(slots=True)
class TokenPace:
    """When the requests of one worker last got tokens. `num_decoding` of those that the last step with decodes gave one run still. Untimed are decodes and
    prefill positions since a step last had a time."""

    num_decoding: int = 0
    decoded_us: int = 0
    told_us: int = 0
    untimed_decodes: int = 0
    untimed_positions: int = 0

    def leave(self) -> None:
        """One that had tokens runs no more."""
        self.num_decoding = max(0, self.num_decoding - 1)


class ServiceFigures:
    """Since this scheduler began. Seconds, and tokens of a request or of a step."""

    def __init__(self) -> None:
        self.ended: Counter[FinishReason] = Counter()  # by the reason told first: no count goes down
        self.num_prompt_tokens = 0  # of requests that have got a token
        self.num_cached_prompt_tokens = 0  # of these, found in the prefix cache
        self.first_token_s = Histogram(FIRST_TOKEN_S)
        self.inter_token_s = Histogram(TOKEN_S)
        self.time_per_token_s = Histogram(TOKEN_S)
        self.total_s = Histogram(REQUEST_S)
        self.queue_s = Histogram(REQUEST_S)
        self.prefill_s = Histogram(REQUEST_S)
        self.decode_s = Histogram(REQUEST_S)
        self.inference_s = Histogram(REQUEST_S)
        self.prompt_tokens = Histogram(REQUEST_TOKENS)
        self.output_tokens = Histogram(REQUEST_TOKENS)
        self.step_tokens = Histogram(STEP_TOKENS)
        self.step_s = {phase: Histogram(STEP_S) for phase in PHASES}

    def step(
        self, pace: TokenPace, num_decodes: int, num_prefill_positions: int, num_tokens: int, compute_us: int, now_us: int
    ) -> None:
        """A step has given `num_tokens` tokens, and its worker computed for `compute_us` (0: together with the next, whose time it is).

        Time between tokens is not kept per request: of those that decode, as many as decoded in the last such step and run still waited
        since that, the others since the last step that gave tokens. So a count is exact but for who joins and leaves in one step.
        """
        if num_decodes:
            num_steady = min(num_decodes, pace.num_decoding)
            if num_steady:
                self.inter_token_s.add((now_us - pace.decoded_us) / 1e6, num_steady)
            if num_decodes > num_steady and pace.told_us:
                self.inter_token_s.add((now_us - pace.told_us) / 1e6, num_decodes - num_steady)
            pace.num_decoding, pace.decoded_us = num_decodes, now_us
        if num_tokens:
            pace.told_us = now_us
        self.step_tokens.add(num_prefill_positions + num_tokens)
        pace.untimed_decodes += num_decodes
        pace.untimed_positions += num_prefill_positions
        if compute_us > 0:
            phase = "decode" if not pace.untimed_positions else "mixed" if pace.untimed_decodes else "prefill"
            self.step_s[phase].add(compute_us / 1e6)
            pace.untimed_decodes = pace.untimed_positions = 0

    def first_token(self, sequence: Sequence) -> None:
        """A request has its first token, and its timings say when."""
        self.num_prompt_tokens += sequence.ledger.prompt_len
        self.num_cached_prompt_tokens += sequence.num_cached_tokens
        self.first_token_s.add(sequence.timings.ttft_us / 1e6)

    def end(self, sequence: Sequence) -> None:
        """A request has its terminal mark. Of one that got no token only the times that it had count."""
        assert sequence.finish is not None
        timings, output_len = sequence.timings, sequence.output_len
        self.ended[sequence.finish.reason] += 1
        self.total_s.add(timings.total_us / 1e6)
        self.prompt_tokens.add(sequence.ledger.prompt_len)
        self.output_tokens.add(output_len)
        if timings.queue_us or timings.ttft_us:
            self.queue_s.add(timings.queue_us / 1e6)
        if timings.ttft_us:
            decode_us = max(0, timings.total_us - timings.ttft_us)
            self.prefill_s.add(max(0, timings.ttft_us - timings.queue_us) / 1e6)
            self.decode_s.add(decode_us / 1e6)
            self.inference_s.add(max(0, timings.total_us - timings.queue_us) / 1e6)
            if output_len > 1:
                self.time_per_token_s.add(decode_us / 1e6 / (output_len - 1))
