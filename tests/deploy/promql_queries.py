"""What the dashboard and the alert rules ask Prometheus for."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import promql_parser as promql
import yaml

from tests.deploy.image_build import ROOT

DASHBOARD = ROOT / "deploy" / "grafana" / "tessera.json"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yaml"

OF_PROMETHEUS = {"up"}
"""Series that Prometheus makes itself."""

OF_TARGETS = {"job", "instance", "namespace"}
"""Labels that Prometheus gives to all series of a process; `namespace` in Kubernetes."""


@dataclass(frozen=True, slots=True)
class Selection:
    """One metric in one query. `asked`: label -> value or regular expression; `grouped`: labels by which something around it adds up or meets."""

    where: str
    metric: str
    asked: dict[str, str]
    grouped: frozenset[str]


def dashboard() -> Any:
    return json.loads(DASHBOARD.read_text())


def queries() -> Iterator[tuple[str, str]]:
    """Where, and the query, without the variables of Grafana that PromQL does not know."""
    board = dashboard()
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield f"panel {panel['title']}", target["expr"].replace("$__rate_interval", "5m")
    for annotation in board["annotations"]["list"]:
        yield f"annotation {annotation['name']}", annotation["expr"]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            selector, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"]).groups()  # type: ignore[union-attr]
            yield f"variable {variable['name']}", f"sum by ({label}) ({selector})"
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            yield f"alert {rule['alert']}", rule["expr"]


def selections() -> Iterator[Selection]:
    """Every metric in every query. Raises ValueError where Prometheus could not read one."""
    for where, query in queries():
        yield from _in(where, promql.parse(query), frozenset())


def _in(where: str, expression: Any, grouped: frozenset[str]) -> Iterator[Selection]:
    match expression:
        case promql.VectorSelector():
            asked = {matcher.name: matcher.value for matcher in expression.matchers.matchers}
            yield Selection(where, expression.name, asked, grouped)
        case promql.MatrixSelector():
            yield from _in(where, expression.vector_selector, grouped)
        case promql.ParenExpr():
            yield from _in(where, expression.expr, grouped)
        case promql.Call():
            for argument in expression.args:
                yield from _in(where, argument, grouped)
        case promql.AggregateExpr():
            by = expression.modifier.labels if expression.modifier else ()
            yield from _in(where, expression.expr, grouped | set(by))
        case promql.BinaryExpr():
            matching = expression.modifier.matching if expression.modifier else None
            on = frozenset(matching.labels) if matching else frozenset()
            for side in (expression.lhs, expression.rhs):
                yield from _in(where, side, grouped | on)
        case promql.NumberLiteral():
            pass
        case _:
            raise AssertionError(f"{where}: {expression} is not known here")
