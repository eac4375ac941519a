"""`tessera worker`: from options to one frozen WorkerConfig, then the role's own `run`."""

from typing import Any

import click

from services.cli.access_texts import ACCESS_TEXTS
from services.cli.config_options import Text, build_config, config_options
from services.cli.device_texts import DEVICE_TEXTS
from services.cli.early_stop import end_on_sigterm
from services.cli.speculation_texts import SPECULATION_TEXTS
from services.cli.trace_texts import OTLP_ENDPOINT
from services.worker.config import WorkerConfig

_TEXTS = {
    "model": Text(
        "A known name (SmolLM2-135M-Instruct), a directory (config.json, *.safetensors, tokenizer.json) or a .gguf file.",
        "MODEL",
    ),
    "listen": Text("Where the scheduler connects. Port 0 takes a free one.", "HOST:PORT"),
    "kv_cache_bytes": Text(
        "Memory for the KV cache, of all processes together; whole blocks of it are used. Without it: 536870912 on a CPU; on GPUs what "
        "gpu-memory-utilization leaves beside the model.",
        "BYTES",
    ),
    "swap_bytes": Text(
        "Host memory for the KV of running sequences that must make room, where the scheduler's preemption mode is swap. 0: none.",
        "BYTES",
    ),
    "block_size": Text("Tokens in one KV block: 1, or a multiple of 16.", "TOKENS"),
    "max_num_seqs": Text("Most sequences in one batch, 1 or more.", "COUNT"),
    "max_num_batched_tokens": Text(
        "Most token positions in one batch, at least max-num-seqs. Running answers wait for the whole batch.", "TOKENS"
    ),
    "max_model_len": Text("Longest prompt plus output. Without it: what the model was trained for.", "TOKENS"),
    **SPECULATION_TEXTS,
    "threads": Text(
        "Threads that compute, 1 to 1024, in each process of the worker. Without it: one per core that it may use, shared among them.",
        "COUNT",
    ),
    "tensor_parallel_size": Text(
        "Processes that hold the model together, each a part of its weights and of the KV cache; must divide its attention heads.",
        "COUNT",
    ),
    "expert_parallel_size": Text(
        "Workers that share the experts of one model, of a scheduler with --lockstep; each computes its requests.", "COUNT"
    ),
    "expert_parallel_rank": Text("Which of these workers this one is, from 0.", "NUMBER"),
    "expert_parallel_store": Text("Where these workers find each other: number 0 listens there.", "HOST:PORT"),
    **DEVICE_TEXTS,
    "batch_invariant": Text(
        "Compute a request bit for bit the same alone, in any batch, and after any preemption or restart; slower where torch computes (see docs/operations.md)."
    ),
    "heartbeat_ms": Text("How often the worker says that it lives.", "MS"),
    "drain_grace_s": Text("After SIGTERM, how long its requests may take to go to other workers, or to end.", "SECONDS"),
    **ACCESS_TEXTS,
    "metrics_listen": Text(
        "Where Prometheus reads /metrics (plain HTTP). Port 0 takes a free one; empty: nowhere.", "HOST:PORT"
    ),
    "otlp_endpoint": OTLP_ENDPOINT,
    "ready_file": Text("Written once serving: JSON with the bound `address`; removed at the end.", "PATH"),
    "log_level": Text("Least level that is logged, to standard error.", choices=("debug", "info", "warning", "error")),
}


@click.command("worker", short_help="Run one model worker.")
@config_options(WorkerConfig, _TEXTS)
def command(**options: Any) -> None:
    """Run one model worker: it holds the weights and the KV cache and computes the batches that its scheduler sends.

    \b
    Example, with a quarter of the default cache:
      tessera worker --model SmolLM2-135M-Instruct --kv-cache-bytes 134217728

    It serves as soon as the model is loaded. SIGTERM or Ctrl-C ends it once its requests have gone to
    other workers or ended, after at most drain-grace-s.
    """
    config = build_config(WorkerConfig, options)
    end_on_sigterm()
    from services.cli.role_process import run_role  # here: `--help` needs no torch
    from services.worker.main import run

    run_role(run, config)
