"""Computes what a rule says of made-up series: as much of PromQL as the rules of deploy/prometheus use. Parsed by `promql-parser`, as Prometheus does.

Rates are slopes between the first and the last sample of a window, without Prometheus's extrapolation to its ends.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import promql_parser as promql

STALE_S = 300.0
"""How long the last sample of a series counts."""

STEP_S = 15.0

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
Window = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Series:
    """One series: name and labels in it, the label `__name__` among them; a value each STEP_S from 0 on, None where there is none."""

    labels: Labels
    values: Sequence[float | None]

    def window(self, from_s: float, to_s: float) -> Window:
        """Samples after `from_s`, up to `to_s`."""
        timed = ((index * STEP_S, value) for index, value in enumerate(self.values))
        return [(at, value) for at, value in timed if value is not None and from_s < at <= to_s]


def series(text: str, notation: str) -> Series:
    """As promtool's tests have them: `name{label="value"}`, and `1x20` (21 times 1), `0+2x20` (0, 2, ... 40), `_x3` (nothing, three times)."""
    selector = promql.parse(text)
    labels = {matcher.name: matcher.value for matcher in selector.matchers.matchers} | {"__name__": selector.name}
    values: list[float | None] = []
    for part in notation.split():
        first, step, times = re.fullmatch(r"(_|[\d.]+)(?:\+([\d.]+))?x(\d+)", part).groups()  # type: ignore[union-attr]
        if first == "_":
            values += [None] * int(times)
        else:
            values += [float(first) + float(step or 0) * number for number in range(int(times) + 1)]
    return Series(frozenset(labels.items()), values)


def evaluate(expression: Any, data: Sequence[Series], at_s: float) -> Vector | float:
    """The value of a parsed expression at a time."""
    match expression:
        case promql.NumberLiteral():
            return float(expression.val)
        case promql.ParenExpr():
            return evaluate(expression.expr, data, at_s)
        case promql.VectorSelector():
            then_s = at_s - (expression.offset.total_seconds() if expression.offset else 0.0)
            windows = _selected(expression, data, then_s, STALE_S)
            return {labels: window[-1][1] for labels, window in windows.items()}
        case promql.Call():
            return _call(expression, data, at_s)
        case promql.AggregateExpr():
            return _aggregated(expression, _vector(expression.expr, data, at_s))
        case promql.BinaryExpr():
            return _binary(expression, evaluate(expression.lhs, data, at_s), evaluate(expression.rhs, data, at_s))
    raise AssertionError(f"{expression} is not known here")


def fires(rule: Mapping[str, Any], data: Sequence[Series], until_s: float) -> list[dict[str, str]]:
    """Labels of the alerts that `rule` raises at `until_s`, evaluated each STEP_S from 0 on."""
    expression = promql.parse(rule["expr"])
    wait_s = promql.parse_duration(rule["for"]).total_seconds() if "for" in rule else 0.0
    since: dict[Labels, float] = {}
    for step in range(int(until_s / STEP_S) + 1):
        at_s = step * STEP_S
        since = {labels: since.get(labels, at_s) for labels in _named(evaluate(expression, data, at_s))}
    return [dict(labels) for labels, began_s in since.items() if until_s - began_s >= wait_s]


def _named(value: Vector | float) -> Vector:
    assert isinstance(value, dict), "a rule is a vector"
    return value


def _vector(expression: Any, data: Sequence[Series], at_s: float) -> Vector:
    return _named(evaluate(expression, data, at_s))


def _selected(selector: Any, data: Sequence[Series], at_s: float, length_s: float) -> dict[Labels, Window]:
    found = {}
    for one in data:
        labels = dict(one.labels)
        if labels.get("__name__") == selector.name and all(_fits(matcher, labels) for matcher in selector.matchers.matchers):
            window = one.window(at_s - length_s, at_s)
            if window:
                found[one.labels] = window
    return found


def _fits(matcher: Any, labels: Mapping[str, str]) -> bool:
    value = labels.get(matcher.name, "")
    match str(matcher.op).removeprefix("MatchOp."):
        case "Equal":
            return bool(value == matcher.value)
        case "NotEqual":
            return bool(value != matcher.value)
        case "Re":
            return re.fullmatch(matcher.value, value) is not None
        case _:
            return re.fullmatch(matcher.value, value) is None


def _call(call: Any, data: Sequence[Series], at_s: float) -> Vector:
    if call.func.name == "histogram_quantile":
        return _quantiles(call.args[0].val, _vector(call.args[1], data, at_s))
    over: dict[str, Callable[[Window], float | None]] = {
        "rate": lambda window: _increase(window, per_second=True),
        "increase": lambda window: _increase(window, per_second=False),
        "max_over_time": lambda window: max(value for _, value in window),
        "min_over_time": lambda window: min(value for _, value in window),
    }
    (matrix,) = call.args
    windows = _selected(matrix.vector_selector, data, at_s, matrix.range.total_seconds())
    values = {_without_name(labels): over[call.func.name](window) for labels, window in windows.items()}
    return {labels: value for labels, value in values.items() if value is not None}


def _increase(window: Window, *, per_second: bool) -> float | None:
    if len(window) < 2:
        return None
    risen = sum(after if after < before else after - before for (_, before), (_, after) in pairwise(window))
    return risen / (window[-1][0] - window[0][0]) if per_second else risen


def _quantiles(part: float, buckets: Vector) -> Vector:
    """Linear within a bucket, as Prometheus has it."""
    grouped: dict[Labels, list[tuple[float, float]]] = defaultdict(list)
    for labels, count in buckets.items():
        grouped[_without(labels, {"le"})].append((float(dict(labels)["le"]), count))
    found = {}
    for labels, pairs in grouped.items():
        pairs.sort()
        rank, low, before = part * pairs[-1][1], 0.0, 0.0
        if not rank:
            continue
        for bound, count in pairs:
            if count >= rank:
                found[labels] = low if math.isinf(bound) else low + (bound - low) * (rank - before) / (count - before)
                break
            low, before = bound, count
    return found


def _aggregated(expression: Any, values: Vector) -> Vector:
    groups: dict[Labels, list[float]] = defaultdict(list)
    names = set(expression.modifier.labels) if expression.modifier else set()
    for labels, value in values.items():
        groups[_only(labels, names)].append(value)
    fold = {"sum": sum, "max": max, "min": min}[str(expression.op)]
    return {labels: float(fold(found)) for labels, found in groups.items()}


def _binary(expression: Any, left: Vector | float, right: Vector | float) -> Vector:
    operator = str(expression.op)
    if isinstance(right, float):
        pairs = [(labels, value, right) for labels, value in _named(left).items()]
    else:
        key = _key_of(expression.modifier)
        others = {key(labels): value for labels, value in right.items()}
        own = _named(left)
        match operator:
            case "and":
                return {labels: value for labels, value in own.items() if key(labels) in others}
            case "unless":
                return {labels: value for labels, value in own.items() if key(labels) not in others}
            case "or":
                mine = {key(labels) for labels in own}
                return own | {labels: value for labels, value in right.items() if key(labels) not in mine}
        pairs = [(labels, value, others[key(labels)]) for labels, value in own.items() if key(labels) in others]
    compare = {"==": lambda a, b: a == b, ">": lambda a, b: a > b, "<": lambda a, b: a < b}
    if operator in compare:
        return {labels: a for labels, a, b in pairs if compare[operator](a, b)}
    compute: dict[str, Callable[[float, float], float]] = {
        "+": lambda a, b: a + b,
        "-": lambda a, b: a - b,
        "/": lambda a, b: a / b if b else math.nan,
    }
    return {_without_name(labels): compute[operator](a, b) for labels, a, b in pairs}


def _key_of(modifier: Any) -> Callable[[Labels], Labels]:
    """By what labels two sides meet."""
    if modifier is None or modifier.matching is None:
        return _without_name
    names = set(modifier.matching.labels)
    assert str(modifier.matching.type).endswith("Include"), "only `on` is known here"
    return lambda labels: _only(labels, names)


def _only(labels: Labels, names: set[str]) -> Labels:
    return frozenset(pair for pair in labels if pair[0] in names)


def _without(labels: Labels, names: set[str]) -> Labels:
    return frozenset(pair for pair in labels if pair[0] not in names)


def _without_name(labels: Labels) -> Labels:
    return _without(labels, {"__name__"})
