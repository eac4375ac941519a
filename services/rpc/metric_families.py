"""Metric families made of what a process has counted already."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

Labelled: TypeAlias = Iterable[tuple[Mapping[str, str], float]]
"""Values, each with its own labels, whose names are the same for all."""


class Families:
    """Families with labels in common, in the order in which they are added. Counters are named without their `_total`."""

    def __init__(self, **labels: str) -> None:
        self.metrics: list[Metric] = []
        self._labels = labels

    def gauge(self, name: str, text: str, value: float, **labels: str) -> None:
        """One present value."""
        self.gauges(name, text, tuple(labels), [(labels, value)])

    def gauges(self, name: str, text: str, label_names: Sequence[str], values: Labelled) -> None:
        """Present values."""
        self._fill(GaugeMetricFamily(name, text, labels=(*self._labels, *label_names)), values)

    def counter(self, name: str, text: str, value: float) -> None:
        """One count."""
        self.counters(name, text, (), [({}, value)])

    def counters(self, name: str, text: str, label_names: Sequence[str], values: Labelled) -> None:
        """Counts."""
        self._fill(CounterMetricFamily(name, text, labels=(*self._labels, *label_names)), values)

    def histogram(
        self, name: str, text: str, bounds: Sequence[float], counts: Sequence[int], total: float, **labels: str
    ) -> None:
        """Values by range: `counts[n]` above `bounds[n - 1]` and not above `bounds[n]`, the last above all of them; `total` is their sum."""
        texts = [floatToGoString(bound) for bound in (*bounds, float("inf"))]
        buckets = list(zip(texts, accumulate(counts), strict=True))
        family = self._known(name) or HistogramMetricFamily(name, text, labels=(*self._labels, *labels))
        family.add_metric([*self._labels.values(), *labels.values()], buckets, total)
        if family not in self.metrics:
            self.metrics.append(family)

    def _known(self, name: str) -> HistogramMetricFamily | None:
        found = next((metric for metric in self.metrics if metric.name == name), None)
        assert found is None or isinstance(found, HistogramMetricFamily), f"{name} is something else already"
        return found

    def _fill(self, family: GaugeMetricFamily | CounterMetricFamily, values: Labelled) -> None:
        for labels, value in values:
            family.add_metric([*self._labels.values(), *labels.values()], value)
        self.metrics.append(family)
