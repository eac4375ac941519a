"""What a leader shows to Prometheus, after requests of known numbers."""

from leader_table import Table, submission
from prometheus_client.core import Metric

from services.scheduler.leader_sight import LeaderSight
from services.scheduler.metrics import FINISHED, scheduler_metrics
from tessera.values.finish import FinishReason
from tessera.values.session import Abort


class Shown:
    """The terms of a process that leads at `table`, or stands by."""

    def __init__(self, table: Table | None) -> None:
        self.table = table
        self.num_takeovers = int(table is not None)

    def sight(self) -> LeaderSight | None:
        return self.table.leader.sight() if self.table is not None else None

    def value(self, name: str, **labels: str) -> float:
        samples = [sample for metric in scheduler_metrics(self) for sample in metric.samples if sample.name == name]
        found = [sample.value for sample in samples if labels.items() <= sample.labels.items()]
        assert found, f"no sample {name} {labels}"
        return sum(found)

    def families(self) -> list[Metric]:
        return list(scheduler_metrics(self))


def test_every_reason_has_a_name_that_dashboards_know() -> None:
    assert FINISHED.keys() == set(FinishReason)


def test_a_standby_shows_that_it_stands_by() -> None:
    shown = Shown(None)
    assert [metric.name for metric in shown.families()] == ["tessera:leading", "tessera:takeovers"]
    assert shown.value("tessera:leading") == 0


def test_requests_tokens_and_times_are_counted() -> None:
    table = Table()
    shown, gateway = Shown(table), table.gateway()
    gateway.submit(submission(1, [5, 6, 7], max_tokens=4))
    gateway.submit(submission(2, [5, 6, 7, 8], max_tokens=1))
    assert shown.value("vllm:num_requests_waiting") + shown.value("vllm:num_requests_running") == 2
    assert shown.value("tessera:journal_lag_records") >= 0
    while table.outbox:
        table.now_us += 30_000
        table.run(steps=1)
    assert shown.value("tessera:session_lag_tokens", gateway=gateway.session.gateway_id.hex()) == 5
    gateway.read()
    assert shown.value("tessera:session_lag_tokens") == 0
    aborted = gateway.submit(submission(3, [9], max_tokens=64))
    table.leader.heard(gateway.session, Abort(aborted, 0))
    assert shown.value("vllm:request_success_total", finished_reason="length") == 2
    assert shown.value("vllm:request_success_total", finished_reason="abort") == 1
    assert shown.value("vllm:prompt_tokens_total") == 7
    assert shown.value("vllm:request_generation_tokens_sum") == 5
    assert shown.value("vllm:time_to_first_token_seconds_count") == 2
    assert shown.value("vllm:request_time_per_output_token_seconds_count") == 1
    assert shown.value("vllm:e2e_request_latency_seconds_count") == 3
    assert shown.value("vllm:inter_token_latency_seconds_count") == 3
    assert 0.09 <= shown.value("vllm:inter_token_latency_seconds_sum") <= 0.2
    assert shown.value("vllm:iteration_tokens_total_sum") == 7 + 5
    assert shown.value("vllm:cache_config_info", block_size=str(table.worker.description.geometry.block_size)) == 1
    assert shown.value("tessera:durable") == 1 and shown.value("tessera:epoch") == 1


def test_what_the_store_has_not_acknowledged_is_lag() -> None:
    table = Table()
    table.store_answers = False
    gateway = table.gateway()
    gateway.submit(submission(1, [5, 6, 7], max_tokens=2))
    table.run()
    table.now_us += 250_000
    shown = Shown(table)
    assert shown.value("tessera:journal_lag_records") >= 1
    assert shown.value("tessera:journal_lag_seconds") >= 0.25


def test_a_usage_of_blocks_is_a_part_of_one() -> None:
    table = Table()
    shown = Shown(table)
    assert shown.value("vllm:kv_cache_usage_perc") == 0
    table.gateway().submit(submission(1, list(range(1, 20)), max_tokens=4))
    assert 0 < shown.value("vllm:kv_cache_usage_perc") < 1


def test_a_new_leader_counts_its_own_ends_alone() -> None:
    table = Table()
    table.gateway().submit(submission(1, [5, 6, 7], max_tokens=2))
    table.run()
    later = Shown(Table(table.worker, table.store, term=2))
    assert later.value("vllm:request_success_total") == 0
    assert later.value("vllm:e2e_request_latency_seconds_count") == 0
