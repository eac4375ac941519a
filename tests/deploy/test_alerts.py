"""The alert rules: each parses, says where to read on, rises where it should and stays silent where it should not."""

import re
from typing import Any

import promql_parser
import pytest
import yaml

from tests.deploy.image_build import ROOT
from tests.deploy.promql_evaluation import evaluate, fires, series

RULES: dict[str, Any] = {
    rule["alert"]: rule
    for group in yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
}
UNTIL_S = 1200.0
STEPS = int(UNTIL_S / 15)

J = 'job="tessera-scheduler",namespace="llm"'
A, B = f'{J},instance="a"', f'{J},instance="b"'
GATEWAY = 'job="tessera-gateway",namespace="llm",instance="g"'
M = f'{A},model_name="m"'

ALWAYS = f"x{STEPS}"


def buckets(name: str, fast: float, slow: float) -> dict[str, str]:
    """A histogram of which in each step `fast` values come below 1 s, and `slow` between 30 and 60."""
    return {
        f'{name}_bucket{{{M},le="{bound}"}}': f"0+{count}{ALWAYS}"
        for bound, count in (("1", fast), ("30", fast), ("60", fast + slow), ("+Inf", fast + slow))
    }


CASES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "TesseraProcessDown": ({f"up{{{A}}}": "1x40 0x40"}, {f"up{{{A}}}": f"1{ALWAYS}", 'up{job="other"}': f"0{ALWAYS}"}),
    "TesseraNoLeader": (
        {f"tessera:leading{{{A}}}": "1x40 0x40", f"tessera:leading{{{B}}}": f"0{ALWAYS}"},
        {f"tessera:leading{{{A}}}": "1x40 0x40", f"tessera:leading{{{B}}}": "0x40 1x40"},
    ),
    "TesseraGatewayDisconnected": (
        {f"tessera:gateway_connected{{{GATEWAY}}}": f"0{ALWAYS}"},
        {f"tessera:gateway_connected{{{GATEWAY}}}": "1x78 0x1"},
    ),
    "TesseraStalled": (
        {
            f"vllm:num_requests_running{{{M}}}": f"0{ALWAYS}",
            f"vllm:num_requests_waiting{{{M}}}": f"3{ALWAYS}",
            f"vllm:iteration_tokens_total_count{{{M}}}": f"7{ALWAYS}",
        },
        {
            f"vllm:num_requests_running{{{M}}}": f"1{ALWAYS}",
            f"vllm:num_requests_waiting{{{M}}}": f"3{ALWAYS}",
            f"vllm:iteration_tokens_total_count{{{M}}}": f"0+1{ALWAYS}",
        },
    ),
    "TesseraTakeovers": (
        {f"tessera:epoch{{{A}}}": f"1+1{ALWAYS}"},
        {f"tessera:epoch{{{A}}}": "1x40 _x40", f"tessera:epoch{{{B}}}": "_x41 2x40"},
    ),
    "TesseraNotDurable": ({f"tessera:durable{{{M}}}": f"0{ALWAYS}"}, {f"tessera:durable{{{M}}}": "1x60 0x1 1x20"}),
    "TesseraJournalLag": (
        {f"tessera:journal_lag_seconds{{{M}}}": f"2{ALWAYS}"},
        {f"tessera:journal_lag_seconds{{{M}}}": f"0.01{ALWAYS}"},
    ),
    "TesseraQueueWait": (
        buckets("vllm:request_queue_time_seconds", 1, 1),
        buckets("vllm:request_queue_time_seconds", 100, 1),
    ),
    "TesseraSlowFirstToken": (
        buckets("vllm:time_to_first_token_seconds", 1, 1),
        buckets("vllm:time_to_first_token_seconds", 100, 1),
    ),
    "TesseraSlowTokens": (
        buckets("vllm:inter_token_latency_seconds", 10, 1),
        buckets("vllm:inter_token_latency_seconds", 1000, 1),
    ),
    "TesseraRefusing": (
        {
            f'tessera:refused_calls_total{{{GATEWAY},grpc_code="ResourceExhausted",reason="OVERLOADED"}}': f"0+1{ALWAYS}",
            f'grpc_server_started_total{{{GATEWAY},grpc_service="tessera.v1.InferenceService"}}': f"0+4{ALWAYS}",
            f'grpc_server_started_total{{{GATEWAY},grpc_service="grpc.health.v1.Health"}}': f"0+400{ALWAYS}",
        },
        {
            f'tessera:refused_calls_total{{{GATEWAY},grpc_code="InvalidArgument",reason="INVALID_FIELD"}}': f"0+4{ALWAYS}",
            f'tessera:refused_calls_total{{{GATEWAY},grpc_code="ResourceExhausted",reason="OVERLOADED"}}': f"0+1{ALWAYS}",
            f'grpc_server_started_total{{{GATEWAY},grpc_service="tessera.v1.InferenceService"}}': f"0+40{ALWAYS}",
        },
    ),
    "TesseraKvFull": (
        {f"vllm:kv_cache_usage_perc{{{M}}}": f"0.99{ALWAYS}", f"vllm:num_preemptions_total{{{M}}}": f"0+9{ALWAYS}"},
        {f"vllm:kv_cache_usage_perc{{{M}}}": f"0.99{ALWAYS}", f"vllm:num_preemptions_total{{{M}}}": f"5{ALWAYS}"},
    ),
    "TesseraInternalErrors": (
        {f'grpc_server_handled_total{{{GATEWAY},grpc_service="s",grpc_method="m",grpc_code="Internal"}}': "_x70 1x10"},
        {f'grpc_server_handled_total{{{GATEWAY},grpc_service="s",grpc_method="m",grpc_code="Internal"}}': f"1{ALWAYS}"},
    ),
    "TesseraFailedAnswers": (
        {f'vllm:request_success_total{{{M},finished_reason="error"}}': "0x70 1x10"},
        {f'vllm:request_success_total{{{M},finished_reason="stop"}}': f"0+1{ALWAYS}"},
    ),
    "TesseraContradictions": (
        {f"tessera:contradictions_total{{{M}}}": f"0{ALWAYS}", f"tessera:worker_refused_batches_total{{{M}}}": "0x70 1x10"},
        {f"tessera:contradictions_total{{{M}}}": f"0{ALWAYS}", f"tessera:worker_refused_batches_total{{{M}}}": f"0{ALWAYS}"},
    ),
    "TesseraGatewayBusy": (
        {f"process_cpu_seconds_total{{{GATEWAY}}}": f"0+14{ALWAYS}", f"tessera:gateway_connected{{{GATEWAY}}}": f"1{ALWAYS}"},
        {f"process_cpu_seconds_total{{{A}}}": f"0+14{ALWAYS}", f"tessera:gateway_connected{{{GATEWAY}}}": f"1{ALWAYS}"},
    ),
    "TesseraOpenFiles": (
        {f"process_open_fds{{{GATEWAY}}}": f"900{ALWAYS}", f"process_max_fds{{{GATEWAY}}}": f"1024{ALWAYS}"},
        {f"process_open_fds{{{GATEWAY}}}": f"90{ALWAYS}", f"process_max_fds{{{GATEWAY}}}": f"1024{ALWAYS}"},
    ),
}
"""Alert -> series with which it rises at the end, and series with which it does not."""


@pytest.mark.parametrize("name", RULES)
def test_an_alert_rises_where_it_should_and_nowhere_else(name: str) -> None:
    assert RULES.keys() == CASES.keys()
    bad, good = ([series(*one) for one in case.items()] for case in CASES[name])
    raised = fires(RULES[name], bad, UNTIL_S)
    assert len(raised) == 1 and not fires(RULES[name], good, UNTIL_S)
    named = set(re.findall(r"\$labels\.(\w+)", RULES[name]["annotations"]["summary"]))
    assert named <= raised[0].keys(), f"its text names {named - raised[0].keys()}, which the alert does not have"


@pytest.mark.parametrize("name", RULES)
def test_an_alert_says_how_bad_it_is_and_where_to_read_on(name: str) -> None:
    rule = RULES[name]
    assert rule["labels"]["severity"] in ("critical", "warning")
    headings = re.findall(r"^### (.*)$", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
    assert name in headings and rule["annotations"]["runbook_url"] == f"docs/operations.md#{name.lower()}"


def test_the_manual_has_no_alert_that_is_gone() -> None:
    headings = re.findall(r"^### (Tessera\w+)$", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
    assert headings == list(RULES)


def test_what_is_evaluated_is_what_prometheus_would_say() -> None:
    """Figures of promtool 2.42 for these series, at 60 s."""
    data = [series('x_total{a="1"}', "0+3x4"), series('x_total{a="2"}', "9x2 1x1"), series('h_bucket{le="1"}', "0+1x4")]
    data.append(series('h_bucket{le="+Inf"}', "0+4x4"))

    def at_the_end(query: str) -> list[float]:
        value = evaluate(promql_parser.parse(query), data, 60.0)
        return sorted(value.values()) if isinstance(value, dict) else [value]

    assert at_the_end("x_total") == [1.0, 12.0] and at_the_end("sum(x_total)") == [13.0]
    assert at_the_end('rate(x_total{a="1"}[1m])') == [pytest.approx(0.2)]
    assert at_the_end('x_total{a="1"} unless on (a) x_total > 5') == []
    assert at_the_end("histogram_quantile(0.125, h_bucket)") == [pytest.approx(0.5)]
    assert at_the_end('max_over_time(x_total{a="2"}[1m])') == [9.0]
