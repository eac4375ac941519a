"""`tessera gateway`: from options to one frozen GatewayConfig, then the role's own `run`."""

from typing import Any

import click

from services.cli.access_texts import ACCESS_TEXTS, TOKEN_FILE
from services.cli.config_options import Text, build_config, config_options
from services.cli.early_stop import end_on_sigterm
from services.cli.trace_texts import OTLP_ENDPOINT, TRACE_SAMPLE_RATIO
from services.gateway.config import GatewayConfig

_TEXTS = {
    "scheduler": Text(
        "A scheduler, or dns:///NAME:PORT for all that NAME stands for. Repeat it for each of a group.", "HOST:PORT"
    ),
    "model": Text("The model of the scheduler's workers: its tokenizer and chat template are read here too.", "MODEL"),
    "listen": Text("Where clients connect. Port 0 takes a free one.", "HOST:PORT"),
    "engine_listen": Text(
        "Serve vllm.grpc.engine.VllmEngine here as well, in plain text, for a gateway such as smg. Empty: nowhere.", "HOST:PORT"
    ),
    "receive_bytes_max": Text("Largest request; a larger one is refused (RESOURCE_EXHAUSTED).", "BYTES"),
    "scheduler_wait_ms": Text("How long a request waits for a scheduler before it is UNAVAILABLE.", "MS"),
    "heartbeat_ms": Text("A scheduler silent for three of these is connected to again.", "MS"),
    "detach_grace_ms": Text("How long the request of a client that has left waits for its resume. 0 aborts it at once.", "MS"),
    "slow_reader_ms": Text(
        "How long a client may leave a message unread; then its stream is RESOURCE_EXHAUSTED (reason SLOW_READER). 0: for ever.",
        "MS",
    ),
    "unread_tokens_max": Text("Tokens that may wait behind a message that a client leaves unread; beyond, the same.", "COUNT"),
    "max_concurrent_requests": Text("More at once are refused (RESOURCE_EXHAUSTED); of resumes, twice as many.", "COUNT"),
    "max_requests_per_principal": Text(
        "Of these, most of one principal (who a token or a certificate belongs to); of resumes, twice as many. 0: no limit of its own.",
        "COUNT",
    ),
    "max_concurrent_tokens": Text(
        "Most tokens that all requests may come to, prompts and max_tokens; more are refused (RESOURCE_EXHAUSTED). 0: no limit.",
        "COUNT",
    ),
    "max_tokens_per_principal": Text("Of these, most of one principal. 0: no limit of its own.", "COUNT"),
    **ACCESS_TEXTS,
    "tls_client_ca": Text("CA (PEM) of clients: with it each must have a certificate, whose name is the principal.", "PATH"),
    "share_prefixes": Text(
        "Let the prompts of one principal be found in the prefix cache by the others, who can tell that from the time it takes; the same "
        "for all gateways."
    ),
    "token_file": TOKEN_FILE,
    "metrics_listen": Text(
        "Where Prometheus reads /metrics (plain HTTP). Port 0 takes a free one; empty: nowhere.", "HOST:PORT"
    ),
    "otlp_endpoint": OTLP_ENDPOINT,
    "trace_sample_ratio": TRACE_SAMPLE_RATIO,
    "ready_file": Text("Written once serving: JSON with the bound `address`; removed at the end.", "PATH"),
    "drain_grace_s": Text("After SIGTERM, how long running requests may go on; then their clients are sent on.", "SECONDS"),
    "log_level": Text("Least level that is logged, to standard error.", choices=("debug", "info", "warning", "error")),
}


@click.command("gateway", short_help="Run one gateway.")
@config_options(GatewayConfig, _TEXTS)
def command(**options: Any) -> None:
    """Run one gateway: it serves the public API, turns text into tokens for its scheduler and tokens back into text.

    \b
    Example, with a scheduler on port 50052:
      tessera gateway --scheduler 127.0.0.1:50052 --model SmolLM2-135M-Instruct

    It listens at once; its health is SERVING while a leading scheduler answers. SIGTERM or Ctrl-C ends it after the running
    requests, at most drain-grace-s; what still runs then ends as UNAVAILABLE, and can be resumed at another gateway.
    """
    config = build_config(GatewayConfig, options)
    end_on_sigterm()
    from services.cli.role_process import run_role  # here: `--help` needs no tokenizer
    from services.gateway.main import run

    run_role(run, config)
