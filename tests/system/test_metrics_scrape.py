"""Every role as a process, scraped over HTTP: what it shows is what the document says, and counts what a client did."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
from process_stack import CALM, MODEL, Stack, StackOptions
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from role_process import RoleProcess
from stream_reader import wait_until

from tessera.client import Client, NotFound
from tests.deploy.promql_queries import OF_PROMETHEUS, OF_TARGETS, selections

METRICS = ["--metrics-listen", "127.0.0.1:0"]
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "operations.md"


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    options = StackOptions(MODEL, f"deterministic:{MODEL}", [*CALM.scheduler, *METRICS], METRICS, METRICS)
    with Stack(tmp_path_factory.mktemp("scraped"), options) as stack:
        with Client(stack.address) as client:
            client.generate("One two three", temperature=0.0, max_tokens=6)
            with pytest.raises(NotFound):
                client.generate("One", model="another", max_tokens=1)
        yield stack


def scrape(role: RoleProcess) -> list[Metric]:
    address = json.loads(role.ready_file.read_text())["metrics"]
    with urlopen(f"http://{address}/metrics", timeout=10) as answer:
        return list(text_string_to_metric_families(answer.read().decode()))


def value(role: RoleProcess, name: str, **labels: str) -> float:
    samples = [sample for family in scrape(role) for sample in family.samples if sample.name == name]
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


def shown(role: str, families: list[Metric]) -> dict[str, str]:
    """Rows of the document's table, by metric: of what is our own."""
    rows = {}
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        if not name.startswith("process_"):
            where = "each" if name.startswith(("grpc_", "tessera:refused_calls")) else role
            rows[name] = f"| {where} | `{name}` | {family.type} | {family.documentation} |"
    return rows


def test_the_document_lists_what_is_shown(scraped: Stack) -> None:
    rows: dict[str, str] = {}
    for role, process in (("worker", scraped.worker), ("scheduler", scraped.scheduler), ("gateway", scraped.gateway)):
        rows |= shown(role, scrape(process))
    table = "\n".join(rows.values())
    kinds = "gauge|counter|histogram"  # other tables begin with a role too
    documented = re.findall(
        rf"^\| (?:each|worker|scheduler|gateway) \| `\S*` \| (?:{kinds}) \|.*$", DOCUMENT.read_text(), re.MULTILINE
    )
    assert sorted(documented) == sorted(rows.values()), f"the table is to be:\n{table}"


def test_what_a_client_did_is_counted(scraped: Stack) -> None:
    scheduler = scraped.scheduler
    assert value(scheduler, "tessera:leading") == 1 and value(scheduler, "tessera:takeovers_total") == 1
    assert value(scheduler, "vllm:request_success_total", finished_reason="length", model_name=MODEL) == 1
    assert value(scheduler, "vllm:request_generation_tokens_sum") == 6
    assert value(scheduler, "vllm:time_to_first_token_seconds_count") == 1
    assert value(scheduler, "vllm:inter_token_latency_seconds_count") == 5
    assert value(scheduler, "vllm:num_requests_running") == 0
    assert value(scraped.gateway, "tessera:gateway_connected") == 1
    codes = {code: value(scraped.gateway, "grpc_server_handled_total", grpc_code=code) for code in ("NotFound", "Internal")}
    assert codes == {"NotFound": 1, "Internal": 0}
    assert value(scraped.gateway, "tessera:refused_calls_total", reason="MODEL_NOT_FOUND", grpc_code="NotFound") == 1
    assert value(scraped.worker, "tessera:worker_step_seconds_count", phase="prefill") >= 1
    assert value(scraped.worker, "tessera:worker_step_seconds_count", phase="decode") >= 5


def test_the_dashboard_and_the_alerts_ask_for_metrics_and_labels_that_are_shown(scraped: Stack) -> None:
    samples = [
        sample
        for process in (scraped.worker, scraped.scheduler, scraped.gateway)
        for family in scrape(process)
        for sample in family.samples
    ]
    shown_values: dict[str, dict[str, set[str]]] = {}
    for sample in samples:
        values = shown_values.setdefault(sample.name, {})
        for label, value in sample.labels.items():
            values.setdefault(label, set()).add(value)
    asked = list(selections())
    assert len(asked) > 80
    for one in asked:
        if one.metric in OF_PROMETHEUS:
            continue
        assert one.metric in shown_values, f"{one.where}: nothing shows {one.metric}"
        labels = shown_values[one.metric]
        unknown = (one.asked.keys() | one.grouped) - labels.keys() - OF_TARGETS
        assert not unknown, f"{one.where}: {one.metric} has no {unknown}"
        for label in one.asked.keys() & {"finished_reason", "phase"}:
            assert one.asked[label] in labels[label], f"{one.where}: no {label} is {one.asked[label]}"


def test_a_process_that_was_scraped_ends_in_order(scraped: Stack) -> None:
    scraped.gateway.stop()
    wait_until(lambda: not scraped.gateway.is_running, "the gateway has ended")
    assert scraped.gateway.process is not None and scraped.gateway.process.returncode == 0
    with pytest.raises(OSError):
        scrape(scraped.gateway)
