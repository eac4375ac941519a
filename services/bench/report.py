"""A level's figures as text for people: one level in full, or a row for each of several."""

import math
from collections.abc import Iterable, Iterator

from services.bench.figures import Figures, Spread
from services.bench.outcome import REJECTED

LAG_WARNED_MS = 20.0
"""A client that sends later than this makes another load than the one that was asked for. Timers alone are late by 1 to 2 ms."""

CLIENT_CPU_WARNED = 0.8
"""Cores. One event loop has one."""

_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
_NAME_WIDTH, _NUMBER_WIDTH = 22, 10


def full_report(figures: Figures, objectives: str = "") -> str:
    """All figures of one level, several lines. `objectives`: those of the goodput, as they were given."""
    return "\n".join([*_counts(figures, objectives), *_measures(figures), *_client(figures)])


def _counts(figures: Figures, objectives: str) -> Iterator[str]:
    yield _line("load", f"{figures.load}, for {figures.duration_s:.1f} s")
    told = [f"{figures.num_ok} ok"] + [f"{count} {_status(status)}" for status, count in figures.failed.items()]
    told += [f"{figures.num_interrupted} interrupted"] if figures.num_interrupted else []
    told += [f"{figures.num_retries} retries"] if figures.num_retries else []
    yield _line("requests", f"{', '.join(told)}; {figures.requests_per_s:.2f}/s, {figures.concurrency_peak} at once at most")
    yield _line(
        "prompt tokens",
        f"{figures.input_tokens:,}, {figures.cached_tokens:,} of them cached; {figures.input_tokens_per_s:,.1f}/s",
    )
    preempted = f"; made room for others {figures.num_preemptions} times" if figures.num_preemptions else ""
    yield _line("output tokens", f"{figures.output_tokens:,}; {figures.output_tokens_per_s:,.1f}/s{preempted}")
    if figures.goodput_per_s is not None and figures.goodput_share is not None:
        yield _line("goodput", f"{figures.goodput_per_s:.2f}/s, {figures.goodput_share:.0%} of all, within {objectives}")


def _measures(figures: Figures) -> Iterator[str]:
    yield " " * _NAME_WIDTH + "".join(f"{name:>{_NUMBER_WIDTH}}" for name in _COLUMNS)
    for name, spread in (
        ("TTFT, ms", figures.ttft_ms),
        ("TPOT, ms", figures.tpot_ms),
        ("ITL, ms", figures.itl_ms),
        ("end to end, ms", figures.e2el_ms),
        ("in the queue, ms", figures.queue_ms),
        ("sent late by, ms", figures.lag_ms),
    ):
        if spread is not None:
            yield f"{name:<{_NAME_WIDTH}}" + "".join(_number(getattr(spread, column)) for column in _COLUMNS)


def _client(figures: Figures) -> Iterator[str]:
    per_token = f", {figures.client_token_us:.0f} us for each output token" if figures.client_token_us is not None else ""
    yield _line("this client", f"{figures.client_cpu:.2f} cores{per_token}")


def warnings_of(figures: Figures) -> Iterator[str]:
    """What makes the figures other than they seem, one sentence each."""
    if figures.num_cut:
        yield f"{_requests(figures.num_cut)} cut to what the model has room for"
    if figures.num_skipped:
        yield f"{_requests(figures.num_skipped)} left out, being longer than the model has room for"
    for status, message in figures.messages.items():
        yield f"the first {_status(status)} said: {message}" if message else f"the first {_status(status)} said nothing"
    lag_ms = figures.lag_ms if math.isfinite(figures.load_value) else None  # "all at once" cannot but be one after the other
    if lag_ms is not None and lag_ms.p99 > LAG_WARNED_MS:
        yield (
            f"this client sent late (p99 {lag_ms.p99:.0f} ms): the load was not what was asked for; give it a core of its own, or "
            "share the rate between several"
        )
    if figures.client_cpu > CLIENT_CPU_WARNED:
        yield (
            f"this client computed on {figures.client_cpu:.2f} cores, and can on one: the figures may be its own; share the load between several"
        )


def _requests(count: int) -> str:
    return "1 request was" if count == 1 else f"{count} requests were"


_ROW_HEADS = (
    ("load", 24),
    ("ok", 6),
    ("failed", 7),
    ("req/s", 8),
    ("out tok/s", 10),
    ("TTFT p50", 10),
    ("p99 ms", 9),
    ("TPOT p50", 10),
    ("p99 ms", 9),
    ("ITL p99", 9),
    ("e2e p99", 10),
    ("good/s", 8),
)


def row_heads() -> str:
    """The line above rows of levels."""
    return "".join(f"{name:<{width}}" if name == "load" else f"{name:>{width}}" for name, width in _ROW_HEADS)


def row(figures: Figures) -> str:
    """One level in one line; times in milliseconds."""
    cells: list[str] = [figures.load, str(figures.num_ok), str(figures.num_failed)]
    cells += [f"{figures.requests_per_s:.2f}", f"{figures.output_tokens_per_s:.1f}"]
    measures: Iterable[tuple[Spread | None, str]] = (
        (figures.ttft_ms, "p50"),
        (figures.ttft_ms, "p99"),
        (figures.tpot_ms, "p50"),
        (figures.tpot_ms, "p99"),
        (figures.itl_ms, "p99"),
        (figures.e2el_ms, "p99"),
    )
    cells += ["-" if spread is None else f"{getattr(spread, name):.1f}" for spread, name in measures]
    cells.append("-" if figures.goodput_per_s is None else f"{figures.goodput_per_s:.2f}")
    return "".join(
        f"{cell:<{width}}" if name == "load" else f"{cell:>{width}}"
        for cell, (name, width) in zip(cells, _ROW_HEADS, strict=True)
    )


def _line(name: str, text: str) -> str:
    return f"{name:<{_NAME_WIDTH}}{text}"


def _number(value: float) -> str:
    return f"{value:>{_NUMBER_WIDTH},.2f}" if value < 1000 else f"{value:>{_NUMBER_WIDTH},.0f}"


def _status(status: str) -> str:
    return "rejected" if status == REJECTED else status
