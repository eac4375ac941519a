"""`tessera scheduler`: from options to one frozen SchedulerConfig, then the role's own `run`."""

from typing import Any

import click

from services.cli.access_texts import ACCESS_TEXTS, TOKEN_FILE
from services.cli.config_options import Text, build_config, config_options
from services.cli.early_stop import end_on_sigterm
from services.cli.trace_texts import OTLP_ENDPOINT
from services.scheduler.config import SchedulerConfig
from tessera.values.config import (
    POLICIES,
    PREEMPTION_MODES,
    PREEMPTION_POLICIES,
    PREFIX_INDEXES,
    QUEUE_ORDERS,
    WORKER_CHOICES,
)

_TEXTS: dict[str, Text | None] = {
    "workers": Text(
        "A model worker to drive, HOST:PORT, or dns:///NAME:PORT for every address of a name. May be repeated.",
        "TARGET",
        name="--worker",
    ),
    "redis_url": Text(
        "The Redis that keeps every request's state: redis://HOST:PORT/DB, unix:///PATH, or "
        "sentinel://HOST:PORT,HOST:PORT/SERVICE/DB.",
        "URL",
        name="--redis",
    ),
    "redis_password_file": Text(
        "File with Redis's password, for a URL that has none. Read at each connection.",
        "PATH",
    ),
    "listen": Text("Where gateways connect. Port 0 takes a free one.", "HOST:PORT"),
    "group": Text("Names this scheduler's keys in Redis: one model and one pool of workers.", "NAME"),
    "max_num_seqs": Text("Most sequences in one batch, 1 or more.", "COUNT"),
    "max_num_batched_tokens": Text("Most token positions computed in one step, at least max-num-seqs.", "TOKENS"),
    "enable_prefix_caching": Text("Reuse the KV cache of prompts with a common beginning.", name="--prefix-caching"),
    "prefix_index": Text(
        "How cached prefixes are found: by a chain of digests, or by a tree of their tokens, which takes more memory. Both find the same.",
        choices=PREFIX_INDEXES,
    ),
    "secure_zero": Text("Zero a block of the KV cache before a request of another cache salt gets it."),
    "enable_chunked_prefill": Text("Compute a long prompt in pieces, beside the decodes.", name="--chunked-prefill"),
    "long_prefill_token_threshold": Text("Most tokens of one prompt in one step, with chunked prefill; 0 is no cap.", "TOKENS"),
    "policy": Text(
        "What a step computes: the next token of every running request and prompts beside them (mixed), or prompts alone as long as "
        "there are any (prefill_first).",
        choices=POLICIES,
    ),
    "scheduler_delay_factor": Text(
        "A request is started beside running ones only once the oldest has waited longer than the last step with a prompt took, times "
        "this; 0 or more, 0 is off.",
        "FACTOR",
    ),
    "itl_target_ms": Text(
        "Most time between two tokens of an answer that streams when a prompt comes: of that prompt a step computes only as much as is expected to "
        "fit into it, with chunked prefill; 0 is no cap.",
        "MS",
    ),
    "num_speculative_tokens": Text(
        "Speculation: most tokens that a worker may guess ahead of one answer in a step, where it does (its own option of this name; the "
        "smaller number counts). max-num-batched-tokens must be at least max-num-seqs times 1 + this; 0 is off.",
        "COUNT",
    ),
    "max_batches_in_flight": Text(
        "1 or 2. With 2 the next batch leaves before the last output is known, and one more may follow it of prompts that come late, which join it.",
        "COUNT",
    ),
    "lockstep": Text(
        "The workers compute in lockstep, as those of one model with expert parallelism must: every step goes to all of them, and who has "
        "nothing to compute runs a dummy batch. While one of them is away the others wait."
    ),
    "queue_order": Text(
        "Who goes first of the requests that wait: the first to come, or those with the lowest priority number.",
        choices=QUEUE_ORDERS,
    ),
    "preemption_mode": Text(
        "What becomes of the KV cache of a request that has to make room: it is computed again later, or moved to the worker's host "
        "memory and back (a worker without --swap-bytes, or whose host memory is full, computes again).",
        choices=PREEMPTION_MODES,
    ),
    "preemption_policy": Text(
        "Which running request has to make room: the latest started (fcfs), the one with the largest priority number, the one with the "
        "most tokens to come, so that the shortest end first (shortest_remaining), or the one with the longest cached prefix (recompute).",
        choices=PREEMPTION_POLICIES,
    ),
    "worker_choice": Text(
        "Which of several workers takes a request: the one with the longest cached prefix where its load allows, the one with the "
        "least load, or one after the other.",
        choices=WORKER_CHOICES,
    ),
    "max_queued_requests": Text("Requests that may wait; the next one is refused (RESOURCE_EXHAUSTED).", "COUNT"),
    "max_queued_tokens": Text("Prompt tokens that may wait; the next request is refused.", "TOKENS"),
    "journal_wait_ms": Text("After this long without Redis, tokens leave although not yet durable.", "MS"),
    "journal_backlog_max": Text("Records kept for a Redis that is away; beyond it one full rewrite is owed.", "COUNT"),
    "gateway_grace_ms": Text("How long the requests of a lost gateway live on.", "MS"),
    "result_retention_ms": Text("How long a finished request can still be read.", "MS"),
    "capacity_wait_ms": Text(
        "How long a request waits for a worker whose KV cache holds it to its end, while only smaller ones are there; it ends with an "
        "error then. 0: for ever.",
        "MS",
    ),
    "lease_ms": Text("How long a leader that says nothing keeps the lead, 100 or more; the same for all of a group.", "MS"),
    "hello_wait_ms": Text("After a takeover with live requests: how long gateways have to say what they hold.", "MS"),
    "worker_silence_ms": Text("A worker silent for this long is lost: its requests go on elsewhere.", "MS"),
    **ACCESS_TEXTS,
    "token_file": TOKEN_FILE,
    "metrics_listen": Text(
        "Where Prometheus reads /metrics (plain HTTP). Port 0 takes a free one; empty: nowhere.", "HOST:PORT"
    ),
    "otlp_endpoint": OTLP_ENDPOINT,
    "ready_file": Text("Written once serving: JSON with the bound `address`; removed at the end.", "PATH"),
    "log_level": Text("Least level that is logged, to standard error.", choices=("debug", "info", "warning", "error")),
}


@click.command("scheduler", short_help="Run one scheduler.")
@config_options(SchedulerConfig, _TEXTS)
def command(**options: Any) -> None:
    """Run one scheduler: it owns every request, every block table and every prefix hash, and says what each step computes.

    \b
    Example, with a worker on port 50053 and a Redis on its usual port:
      tessera scheduler --worker 127.0.0.1:50053 --redis redis://127.0.0.1:6379/0

    Several of one group may run: one leads, the others stand by, and one of them leads once the leader has said nothing for lease-ms.
    It keeps trying until Redis and a worker answer. SIGTERM or Ctrl-C hands the lead over at once: what runs goes on under the next
    leader, which may be this one started again.
    """
    config = build_config(SchedulerConfig, options)
    end_on_sigterm()
    from services.cli.role_process import run_role  # here: `--help` needs neither grpc nor redis
    from services.scheduler.main import run

    run_role(run, config)
