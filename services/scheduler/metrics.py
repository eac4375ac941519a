"""What a scheduler shows to Prometheus. Under `vllm:` is what dashboards and autoscalers know by that name, under `tessera:` what is our own."""

from collections.abc import Iterable
from typing import Protocol

from prometheus_client.core import Metric

from services.rpc.metric_families import Families
from services.scheduler.core.histogram import Histogram
from services.scheduler.core.service_figures import ServiceFigures
from services.scheduler.leader_sight import LeaderSight
from tessera.values.finish import FinishReason

FINISHED = {
    FinishReason.EOS: "stop",
    FinishReason.STOP_SEQUENCE: "stop",
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.MAX_TOKENS: "length",
    FinishReason.MAX_MODEL_LEN: "length",
    FinishReason.ABORTED: "abort",
    FinishReason.DEADLINE: "deadline",
    FinishReason.UNSCHEDULABLE: "error",
    FinishReason.ERROR: "error",
}
"""The values of `finished_reason`, as vLLM has them; `deadline` is our own."""


class Lead(Protocol):
    """The terms of a scheduler process."""

    @property
    def num_takeovers(self) -> int:
        """How often this process has begun to lead."""

    def sight(self) -> LeaderSight | None:
        """What there is to see; None while it does not lead."""


def scheduler_metrics(lead: Lead) -> Iterable[Metric]:
    """All families at this moment. A standby has but two: what is known of requests is the leader's."""
    sight = lead.sight()
    own = Families()
    own.gauge("tessera:leading", "1 while this scheduler leads its group.", sight is not None)
    own.counter("tessera:takeovers", "How often this process has begun to lead.", lead.num_takeovers)
    if sight is None:
        return own.metrics
    families = Families(model_name=sight.model)
    _requests(families, sight)
    _tokens(families, sight)
    _times(families, sight.figures)
    _blocks(families, sight)
    _drafts(families, sight)
    _leadership(families, sight)
    return own.metrics + families.metrics


def _requests(families: Families, sight: LeaderSight) -> None:
    load = sight.load
    families.gauge("vllm:num_requests_running", "Requests that hold KV on a worker.", load.num_running)
    families.gauge("vllm:num_requests_waiting", "Requests in the queue.", load.num_waiting)
    families.gauge("tessera:num_requests_swapped", "Requests whose KV is in host memory.", load.num_swapped)
    families.gauge("tessera:queued_tokens", "Tokens of the requests in the queue.", load.num_queued_tokens)
    families.gauge("tessera:batches_in_flight", "Batches that workers have not answered.", load.num_batches_in_flight)
    families.counter("tessera:requests_submitted", "Requests taken in as new.", load.num_submitted)
    ended = dict.fromkeys(FINISHED.values(), 0)
    for reason, count in sight.figures.ended.items():
        ended[FINISHED[reason]] += count
    values = [({"finished_reason": reason}, count) for reason, count in ended.items()]
    families.counters("vllm:request_success", "Requests that have ended, by why.", ("finished_reason",), values)
    families.counter("vllm:num_preemptions", "How often a running request had to make room.", load.num_preemptions)
    families.counter("tessera:swap_outs", "Of the preemptions, those whose KV went to host memory.", load.num_swap_outs)


def _tokens(families: Families, sight: LeaderSight) -> None:
    load, figures = sight.load, sight.figures
    families.counter("vllm:prompt_tokens", "Prompt tokens of requests that have got a token.", figures.num_prompt_tokens)
    text = "Of the prompt tokens, those found in the prefix cache."
    families.counter("vllm:prompt_tokens_cached", text, figures.num_cached_prompt_tokens)
    families.counter("vllm:generation_tokens", "Tokens that workers have sampled.", load.num_sampled_tokens)
    text = "Positions computed again because a takeover lost their KV though a worker held it."
    families.counter("tessera:recomputed_tokens", text, load.recomputed_positions)
    text = "Outputs of which two sources told differently."
    families.counter("tessera:contradictions", text, load.num_contradictions)


def _times(families: Families, figures: ServiceFigures) -> None:
    histograms: list[tuple[str, str, Histogram]] = [
        ("vllm:time_to_first_token_seconds", "From a request's arrival to its first token.", figures.first_token_s),
        ("vllm:inter_token_latency_seconds", "Between two outputs of one request.", figures.inter_token_s),
        (
            "vllm:request_time_per_output_token_seconds",
            "Per token after the first, of ended requests.",
            figures.time_per_token_s,
        ),
        ("vllm:e2e_request_latency_seconds", "From a request's arrival to its end.", figures.total_s),
        ("vllm:request_queue_time_seconds", "From a request's arrival to its first admission.", figures.queue_s),
        ("vllm:request_prefill_time_seconds", "From a request's admission to its first token.", figures.prefill_s),
        ("vllm:request_decode_time_seconds", "From a request's first token to its end.", figures.decode_s),
        ("vllm:request_inference_time_seconds", "From a request's admission to its end.", figures.inference_s),
        ("vllm:request_prompt_tokens", "Prompt tokens of ended requests.", figures.prompt_tokens),
        ("vllm:request_generation_tokens", "Output tokens of ended requests.", figures.output_tokens),
        ("vllm:iteration_tokens_total", "Prompt positions and sampled tokens of one step.", figures.step_tokens),
    ]
    for name, text, one in histograms:
        families.histogram(name, text, one.bounds, one.counts, one.total)
    for phase, one in figures.step_s.items():
        text = "What a worker computed for one step: decodes, prompts, or both (mixed)."
        families.histogram("tessera:step_seconds", text, one.bounds, one.counts, one.total, phase=phase)


def _blocks(families: Families, sight: LeaderSight) -> None:
    load, cache = sight.load, sight.load.prefix_cache
    usage = 1 - load.num_free_blocks / load.num_blocks if load.num_blocks else 0.0
    families.gauge("vllm:kv_cache_usage_perc", "Part of all workers' KV blocks that is in use, 0 to 1.", usage)
    labels = {"block_size": str(sight.block_size), "num_gpu_blocks": str(load.num_blocks)}
    families.gauge("vllm:cache_config_info", "1; the KV cache of all workers is in the labels.", 1, **labels)
    families.counter("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", cache.query_tokens)
    families.counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", cache.hit_tokens)


def _drafts(families: Families, sight: LeaderSight) -> None:
    stats = sight.spec_stats
    families.counter("vllm:spec_decode_num_drafts", "Rows with drafts.", stats.num_steps)
    families.counter("vllm:spec_decode_num_draft_tokens", "Drafts verified.", stats.num_drafts)
    families.counter("vllm:spec_decode_num_accepted_tokens", "Drafts accepted.", stats.num_accepted)
    by_position = [({"position": str(position)}, count) for position, count in enumerate(stats.accepted_by_position)]
    text = "Drafts accepted, by their position in the row."
    families.counters("vllm:spec_decode_num_accepted_tokens_per_pos", text, ("position",), by_position)


def _leadership(families: Families, sight: LeaderSight) -> None:
    families.gauge("tessera:epoch", "Number of the leader's term.", sight.epoch)
    families.gauge("tessera:durable", "1 while Redis keeps up with what clients are shown.", sight.is_durable)
    families.gauge("tessera:journal_lag_records", "Records that Redis has not acknowledged.", sight.journal_records)
    text = "Age of the oldest record that Redis has not acknowledged."
    families.gauge("tessera:journal_lag_seconds", text, sight.journal_lag_us / 1e6)
    unsent = [({"gateway": gateway}, count) for gateway, count in sight.unsent_tokens.items()]
    text = "Output tokens that a gateway may show, and has not taken yet."
    families.gauges("tessera:session_lag_tokens", text, ("gateway",), unsent)
