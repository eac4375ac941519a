"""The dashboard as Grafana reads it. That its metrics are shown is in tests/system/test_metrics_scrape.py."""

from itertools import combinations
from typing import Any

from tests.deploy.promql_queries import dashboard, selections


def test_panels_have_numbers_of_their_own_and_lie_beside_each_other() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 30

    def cells(panel: dict[str, Any]) -> set[tuple[int, int]]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        return {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}

    for one, other in combinations(panels, 2):
        assert not cells(one) & cells(other), f"{one['title']} lies over {other['title']}"


def test_variables_that_queries_use_are_there() -> None:
    board = dashboard()
    known = {f"${variable['name']}" for variable in board["templating"]["list"]}
    used = {word for one in selections() for value in one.asked.values() for word in value.split("|") if word.startswith("$")}
    assert used and used <= known
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in board["panels"] if panel["type"] != "row")


def test_what_an_operator_looks_for_is_on_it() -> None:
    asked = {one.metric for one in selections() if one.where.startswith("panel")}
    assert asked >= {
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_bucket",
        "vllm:generation_tokens_total",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_hits_total",
        "vllm:num_preemptions_total",
        "tessera:refused_calls_total",
        "tessera:journal_lag_seconds",
        "tessera:epoch",
        "tessera:takeovers_total",
        "tessera:step_seconds_bucket",
        "up",
        "process_resident_memory_bytes",
    }
