"""Pictures of a benchmark: latency against load, or one level over time. The only module that needs matplotlib."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from services.bench.figures import Figures, Level, Spread
from services.bench.objectives import Objective

Values = NDArray[np.float64]

BLUE, ORANGE, GREEN, RED = "#2f6db5", "#e08214", "#2a9d6f", "#c8434b"
INK, FAINT_INK, FAINT = "#2b2d33", "#8a8f9c", "#d8dbe2"

STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT_INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "legend.edgecolor": "white",
    "legend.framealpha": 0.85,
    "figure.facecolor": "white",
}

_BEHIND_WORDS: Any = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 2}

DOTS_PER_INCH = 150
POINTS_MAX = 20_000
"""Of pauses, drawn; evenly picked from more."""

TIME_BINS_MAX = 80

WIDE = 30
"""A ratio of values from which on an axis is logarithmic."""


def draw_curve(
    levels: Sequence[Figures], title: str, load_label: str, path: Path, objectives: Sequence[Objective] = ()
) -> None:
    """TTFT, TPOT and ITL, throughput, and requests against the load. `load_label`: what the load is, with its unit."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 7.4), layout=layout())
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, color=INK)
        ((first, per_token), (throughput, requests)) = figure.subplots(2, 2)
        loads = [level.load_value for level in levels]
        first.set_title("Time to first token (TTFT)")
        _percentiles(first, loads, [level.ttft_ms for level in levels], BLUE)
        per_token.set_title("Per output token: mean (TPOT) and pauses (ITL)")
        _percentiles(per_token, loads, [level.tpot_ms for level in levels], GREEN, "TPOT ")
        _line(per_token, loads, [_of(level.itl_ms, "p99") for level in levels], RED, "ITL p99", linestyle=(0, (4, 2)))
        for axes, measure in ((first, "ttft"), (per_token, "tpot")):
            for limit_ms in (objective.limit_ms for objective in objectives if objective.measure == measure):
                axes.axhline(limit_ms, color=FAINT_INK, linewidth=1.2, linestyle=":", label=f"objective, {limit_ms:g} ms")
            axes.set_ylabel("milliseconds")
            _log_where_wide(axes)
        throughput.set_title("Throughput")
        _line(throughput, loads, [level.output_tokens_per_s for level in levels], ORANGE, "output")
        _line(throughput, loads, [level.input_tokens_per_s for level in levels], INK, "prompt", linewidth=1.2, alpha=0.6)
        throughput.set_ylabel("tokens per second")
        throughput.yaxis.set_major_formatter(FuncFormatter(_plain))
        requests.set_title("Requests")
        _requests(requests, levels, loads, is_rate="second" in load_label)
        for axes in (first, per_token, throughput, requests):
            _load_axis(axes, loads, load_label)
            axes.legend(loc="best", fontsize=9)
        figure.savefig(path, dpi=DOTS_PER_INCH)


def layout() -> ConstrainedLayoutEngine:
    """Room between panels, in inches."""
    return ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)


def _requests(axes: Axes, levels: Sequence[Figures], loads: Sequence[float], is_rate: bool) -> None:
    if is_rate:
        axes.plot(loads, loads, color=FAINT_INK, linewidth=1, linestyle=":", label="offered")
    _line(axes, loads, [level.requests_per_s for level in levels], BLUE, "answered")
    if any(level.goodput_per_s is not None for level in levels):
        _line(axes, loads, [level.goodput_per_s for level in levels], GREEN, "within the objectives")
    if any(level.num_failed for level in levels):
        failed = [level.num_failed / level.duration_s if level.duration_s else 0.0 for level in levels]
        _line(axes, loads, failed, RED, "failed")
    axes.set_ylabel("requests per second")
    axes.set_ylim(bottom=0)


def _percentiles(axes: Axes, loads: Sequence[float], spreads: Sequence[Spread | None], color: str, prefix: str = "") -> None:
    low, middle, high = (_values([_of(spread, name) for spread in spreads]) for name in ("p50", "p90", "p99"))
    axes.fill_between(loads, low, high, color=color, alpha=0.12, linewidth=0)
    _line(axes, loads, high, color, f"{prefix}p99", linewidth=1.2, alpha=0.8)
    _line(axes, loads, middle, color, f"{prefix}p90", linewidth=1.2, linestyle=(0, (4, 2)))
    _line(axes, loads, low, color, f"{prefix}p50")


def _line(axes: Axes, loads: Sequence[float], values: Iterable[float | None], color: str, label: str, **style: Any) -> None:
    settings: dict[str, Any] = {"linewidth": 2, "marker": "o", "markersize": 4} | style
    axes.plot(loads, _values(values), color=color, label=label, **settings)


def _values(values: Iterable[float | None]) -> Values:
    """What is not there leaves a gap in a line."""
    return np.array([np.nan if value is None else value for value in values])


def _load_axis(axes: Axes, loads: Sequence[float], label: str) -> None:
    """A tick at every level; a logarithmic axis where levels double."""
    if len(loads) > 2 and max(loads) / min(loads) >= 8:
        axes.set_xscale("log")
    axes.set_xticks(loads, [f"{load:g}" for load in loads])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.minorticks_off()
    axes.set_xlabel(label)
    if axes.get_yscale() == "linear":
        axes.set_ylim(bottom=0)


def _log_where_wide(axes: Axes) -> None:
    """Where the largest value is far above the smallest one, a linear axis would show only that."""
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=np.float64) for line in axes.get_lines()])
    values = values[np.isfinite(values) & (values > 0)]
    if len(values) and values.max() / values.min() > WIDE:
        axes.set_yscale("log")
        _log_ticks(axes.yaxis)
    else:
        axes.yaxis.set_major_formatter(FuncFormatter(_plain))


def _log_ticks(axis: Axis) -> None:
    axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=9))
    axis.set_major_formatter(FuncFormatter(_plain))
    axis.set_minor_formatter(NullFormatter())


def _plain(value: float, _position: int) -> str:
    return f"{value:,.6g}" if abs(value) < 1e6 else f"{value:,.0f}"


def _of(spread: Spread | None, name: str) -> float | None:
    value: float | None = None if spread is None else getattr(spread, name)
    return value


def draw_level(level: Level, title: str, path: Path) -> None:
    """TTFT and ITL of one level by the time of sending, how they are distributed, and what ran and came meanwhile."""
    ok = [outcome for outcome in level.outcomes if outcome.is_ok]
    sent_s = np.array([outcome.sent_s - level.began_s for outcome in ok])
    ttft_ms = np.array([outcome.ttft_ms for outcome in ok])
    pauses = [outcome.itl_ms for outcome in ok]
    pause_sent_s, itl_ms = (
        np.repeat(sent_s, [len(item) for item in pauses]),
        np.array([pause for item in pauses for pause in item]),
    )
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 9.2), layout=layout())
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, color=INK)
        grid = figure.subplots(3, 2, width_ratios=[2.6, 1])
        _over_time(grid[0][0], sent_s, ttft_ms, BLUE, "Time to first token (TTFT)", 18)
        _distribution(grid[0][1], ttft_ms, BLUE, "TTFT")
        _over_time(grid[1][0], pause_sent_s, itl_ms, GREEN, "Inter-token latency (ITL): every pause between two pieces", 5)
        _distribution(grid[1][1], itl_ms, GREEN, "ITL")
        end_s = max((outcome.end_s for outcome in level.outcomes), default=level.began_s + 1) - level.began_s
        _under_way(grid[2][0], level, end_s)
        _distribution(grid[2][1], np.array([outcome.e2el_ms for outcome in ok]), INK, "End to end")
        for axes in (grid[0][0], grid[1][0], grid[2][0]):
            axes.set_xlim(0, end_s)
        figure.savefig(path, dpi=DOTS_PER_INCH)


def _over_time(axes: Axes, at_s: Values, values_ms: Values, color: str, name: str, size: float) -> None:
    axes.set_title(name)
    axes.set_xlabel("sent, seconds after the start")
    axes.set_ylabel("milliseconds")
    step = max(1, len(at_s) // POINTS_MAX)
    axes.scatter(at_s[::step], values_ms[::step], s=size, color=color, alpha=0.4, linewidths=0)
    if _has_tail(values_ms):
        axes.set_yscale("log")
        axes.set_ylim(bottom=_log_floor(values_ms))
        _log_ticks(axes.yaxis)
    else:
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(FuncFormatter(_plain))


def _has_tail(values_ms: Values) -> bool:
    """Whether the largest value is so far above the middle that a linear axis would show nothing of the others."""
    return bool(len(values_ms) and values_ms.max() > WIDE * np.median(values_ms) > 0)


def _log_floor(values_ms: Values) -> float:
    """Where a logarithmic axis begins: pieces that came together have hardly a pause."""
    return max(0.02, float(np.percentile(values_ms, 1)) / 2)


def _distribution(axes: Axes, values_ms: Values, color: str, name: str) -> None:
    """The share of values up to each one, with the percentiles that are in the report."""
    axes.set_title(name)
    ordered = np.sort(values_ms)
    if len(ordered):
        axes.plot(ordered, 100 * np.arange(1, len(ordered) + 1) / len(ordered), color=color, linewidth=2)
        marks = np.percentile(ordered, (50, 90, 99))
        axes.plot(marks, (50, 90, 99), marker="o", markersize=5, color=color, linestyle="none")
        words = "\n".join(f"p{share} {_short(float(mark))} ms" for share, mark in zip((50, 90, 99), marks, strict=True))
        axes.text(
            0.97, 0.06, words, transform=axes.transAxes, ha="right", fontsize=9, color=INK, linespacing=1.4, bbox=_BEHIND_WORDS
        )
    axes.set_xlabel("milliseconds")
    axes.set_ylabel("% of all, up to this")
    axes.set_ylim(0, 102)
    if _has_tail(values_ms):
        axes.set_xscale("log")
        axes.set_xlim(left=_log_floor(values_ms))
        axes.xaxis.set_major_locator(LogLocator(numticks=7))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(_plain))


def _short(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _under_way(axes: Axes, level: Level, end_s: float) -> None:
    """Requests under way, and output pieces per second."""
    axes.set_title("Load")
    steps = sorted(step for item in level.outcomes for step in ((item.sent_s, 1), (item.end_s, -1)))
    at_s, running = (
        np.array([0.0, *(at_s - level.began_s for at_s, _ in steps)]),
        np.cumsum([0, *(change for _, change in steps)]),
    )
    axes.fill_between(at_s, running, step="post", color=INK, alpha=0.15, linewidth=0)
    axes.plot(at_s, running, drawstyle="steps-post", color=INK, linewidth=1.0)
    axes.set_ylabel("requests under way")
    axes.set_xlabel("seconds after the start")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    edges = np.linspace(0, max(end_s, 1e-3), min(TIME_BINS_MAX, max(12, round(2 * end_s))) + 1)
    came = np.concatenate([np.asarray(item.piece_s) - level.began_s for item in level.outcomes] or [np.zeros(0)])
    rate = np.histogram(came, edges)[0] / np.diff(edges)
    other = axes.twinx()
    other.plot((edges[:-1] + edges[1:]) / 2, rate, color=ORANGE, linewidth=2)
    other.set_ylabel("output pieces per second", color=ORANGE)
    other.set_ylim(bottom=0)
    other.grid(visible=False)
    other.yaxis.set_major_formatter(FuncFormatter(_plain))
