"""Figures of one level of load: counts, rates, and how long things took."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from services.bench.objectives import Objective
from services.bench.outcome import REJECTED, Outcome, Served

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Spread:
    """How a measure is distributed, in its own unit; percentiles are interpolated linearly between the two nearest values."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


def spread_of(values: Iterable[float | None]) -> Spread | None:
    """Of the values that are there; None where none is."""
    there = np.array([value for value in values if value is not None], dtype=np.float64)
    if not len(there):
        return None
    p50, p90, p95, p99 = map(float, np.percentile(there, PERCENTILES))
    return Spread(float(there.mean()), p50, p90, p95, p99, float(there.max()))


@dataclass(frozen=True, slots=True)
class Level:
    """One level of load, measured. `load` is in words, `load_value` the number that levels differ in. `outcomes` has every request
    that was sent. `client_cpu_s` is what the client computed meanwhile."""

    load: str
    load_value: float
    began_s: float
    outcomes: Sequence[Outcome]
    num_cut: int = 0
    num_skipped: int = 0
    client_cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Figures:
    """Of a level. Rates are per second, from its beginning to the end of its last request; tokens are those of whole answers. Measures in
    milliseconds are None where nothing was measured, and those of whole answers alone. What was interrupted counts in the duration, the peak and
    the lag, not as failed. `goodput` counts the answers that meet every objective,
    per second; None without one. `client_cpu` is in cores, `client_token_us` for each output token."""

    load: str
    load_value: float
    duration_s: float
    num_ok: int
    failed: dict[str, int]
    num_interrupted: int
    num_retries: int
    num_cut: int
    num_skipped: int
    num_preemptions: int
    concurrency_peak: int
    requests_per_s: float
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    input_tokens_per_s: float
    output_tokens_per_s: float
    goodput_per_s: float | None
    goodput_share: float | None
    client_cpu: float
    client_token_us: float | None
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None
    e2el_ms: Spread | None
    queue_ms: Spread | None
    lag_ms: Spread | None
    messages: dict[str, str] = field(default_factory=dict)
    """The first message of each status."""

    @property
    def num_failed(self) -> int:
        """Rejected ones included."""
        return sum(self.failed.values())

    @property
    def num_rejected(self) -> int:
        """Those that the service had no room for."""
        return self.failed.get(REJECTED, 0)

    def as_json(self) -> dict[str, Any]:
        """All of it, rounded to what can be told apart."""
        told: dict[str, Any] = _rounded(asdict(self))
        return told


def figures_of(level: Level, objectives: Sequence[Objective] = ()) -> Figures:
    """Everything that a level's outcomes say."""
    ok = [outcome for outcome in level.outcomes if outcome.is_ok]
    bad = [outcome for outcome in level.outcomes if not outcome.is_ok and not outcome.is_interrupted]
    served = [outcome.served for outcome in ok if outcome.served is not None]
    duration_s = max((outcome.end_s for outcome in level.outcomes), default=level.began_s) - level.began_s
    per_s = _per(duration_s)
    num_good = sum(all(objective.is_met(outcome) for objective in objectives) for outcome in ok)
    input_tokens, output_tokens = (sum(_all(served, name)) for name in ("input_tokens", "output_tokens"))
    return Figures(
        load=level.load,
        load_value=level.load_value,
        duration_s=duration_s,
        num_ok=len(ok),
        failed=dict(Counter(outcome.status for outcome in bad).most_common()),
        num_interrupted=len(level.outcomes) - len(ok) - len(bad),
        num_retries=sum(outcome.retries for outcome in level.outcomes),
        num_cut=level.num_cut,
        num_skipped=level.num_skipped,
        num_preemptions=sum(_all(served, "num_preemptions")),
        concurrency_peak=concurrency_peak(level.outcomes),
        requests_per_s=per_s(len(ok)),
        input_tokens=input_tokens,
        cached_tokens=sum(_all(served, "cached_tokens")),
        output_tokens=output_tokens,
        input_tokens_per_s=per_s(input_tokens),
        output_tokens_per_s=per_s(output_tokens),
        goodput_per_s=per_s(num_good) if objectives else None,
        goodput_share=num_good / max(1, len(ok) + len(bad)) if objectives else None,
        client_cpu=per_s(level.client_cpu_s),
        client_token_us=1e6 * level.client_cpu_s / output_tokens if output_tokens else None,
        ttft_ms=spread_of(outcome.ttft_ms for outcome in ok),
        tpot_ms=spread_of(outcome.tpot_ms for outcome in ok),
        itl_ms=spread_of(chain.from_iterable(outcome.itl_ms for outcome in ok)),
        e2el_ms=spread_of(outcome.e2el_ms for outcome in ok),
        queue_ms=spread_of(_all(served, "queue_ms")),
        lag_ms=spread_of(outcome.lag_ms for outcome in level.outcomes),
        messages={outcome.status: outcome.message for outcome in reversed(bad)},
    )


def concurrency_peak(outcomes: Iterable[Outcome]) -> int:
    """The most requests under way at one moment. One that ends when another is sent makes room for it."""
    steps = sorted(step for outcome in outcomes for step in ((outcome.sent_s, 1), (outcome.end_s, -1)))
    return int(np.cumsum([change for _, change in steps]).max()) if steps else 0


def _per(duration_s: float) -> Callable[[float], float]:
    return lambda amount: amount / duration_s if duration_s > 0 else 0.0


def _all(served: Sequence[Served], name: str) -> list[Any]:
    return [getattr(item, name) for item in served]


def _rounded(value: Any) -> Any:
    """Floats to 3 decimals, or 4 significant digits below 1; JSON has no infinity, so that is None."""
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, float):
        if math.isinf(value):
            return None
        return round(value, 3) if abs(value) >= 1 else float(f"{value:.4g}")
    return value
