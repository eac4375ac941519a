"""The picture of `make bench`: a bar per workload and precision, and a line across it where the machine's limits lie."""

from collections.abc import Mapping
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from services.bench.plot import BLUE, DOTS_PER_INCH, GREEN, INK, ORANGE, STYLE, layout

COLORS = (INK, BLUE, GREEN, ORANGE)
BAR_WIDTH = 0.8
"""Of all bars of a workload together, in units of the distance between workloads."""

Bars = Mapping[str, Mapping[str, tuple[float, float, float, float]]]
"""By precision and workload: the rate, its lowest and highest, and its bound."""


def draw(bars: Bars, title: str, path: Path) -> None:
    """One panel per workload: rates of 40 and of 400 are both to be read."""
    workloads = list(next(iter(bars.values())))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(2.2 * len(workloads) + 1.5, 4.6), layout=layout())
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, color=INK)
        for axes, workload in zip(figure.subplots(1, len(workloads), squeeze=False)[0], workloads, strict=True):
            axes.set_title(workload)
            for at, of in enumerate(bars.values()):
                rate, lowest, highest, bound = of[workload]
                axes.bar(at, rate, BAR_WIDTH, color=COLORS[at % len(COLORS)])
                axes.errorbar(at, rate, [[rate - lowest], [highest - rate]], color=INK, capsize=3, linewidth=1)
                half = BAR_WIDTH / 2
                label = "what the machine's limits allow" if at == 0 else None
                axes.plot(
                    [at - half, at + half], [bound, bound], color=INK, linewidth=1.6, linestyle=(0, (3, 1.5)), label=label
                )
                axes.annotate(
                    f"{rate:.0f}", (at, highest), (0, 3), textcoords="offset points", ha="center", fontsize=9, color=INK
                )
            axes.set_xticks(range(len(bars)), list(bars))
            axes.grid(visible=False, axis="x")
            axes.set_ylim(bottom=0)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", fontsize=9, frameon=False)
        figure.savefig(path, dpi=DOTS_PER_INCH)
