"""Configuration of one gateway process."""

from dataclasses import dataclass, field
from pathlib import Path

from services.rpc.access_config import AccessConfig
from services.rpc.addresses import check_targets, is_local
from services.rpc.tracing import check_otlp_endpoint, check_sample_ratio
from tessera.values.config import ConfigError, check_minimums


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Parsed once by the command line, then frozen.

    `scheduler` are all schedulers of one group (see `services.rpc.addresses`); whichever leads is listened to. `model` is what the worker
    was started with: a directory, a GGUF file or a known name. `listen` may have port 0: the bound address goes to the log and to
    `ready_file` (JSON with `address`) once the gateway answers. It answers health before there is a scheduler; the service's own
    name is SERVING while a session stands. With `engine_listen` the ready file has `engine_address` too.
    """

    scheduler: tuple[str, ...]
    model: str
    listen: str = "127.0.0.1:50051"
    engine_listen: str = ""  # where vllm.grpc.engine.VllmEngine is served as well, for gateways that speak it; empty: nowhere
    receive_bytes_max: int = 16 << 20  # largest request
    scheduler_wait_ms: int = 10_000  # how long a new request waits for a scheduler before it is UNAVAILABLE
    heartbeat_ms: int = 500  # a session silent for three of these is opened again
    detach_grace_ms: int = 0  # how long the request of a client that has left may be resumed; 0: it is aborted
    slow_reader_ms: int = 30_000  # how long a client may leave a message unread before its call ends; 0: for ever
    unread_tokens_max: int = 16_384  # how many tokens may wait behind such a message
    max_concurrent_requests: int = 4096
    max_requests_per_principal: int = 0  # of these, one principal's; 0: all of them
    max_concurrent_tokens: int = 0  # that all requests may come to, prompts and outputs; 0: no limit
    max_tokens_per_principal: int = 0  # of these, one principal's; 0: no limit of its own
    access: AccessConfig = field(default_factory=AccessConfig)
    tls_client_ca: Path | None = None  # what proves clients, who must have a certificate then
    share_prefixes: bool = False  # whether principals may find each other's prompts in the prefix cache
    token_file: Path | None = None  # holds the token that schedulers know this gateway by
    metrics_listen: str = ""  # host:port of /metrics; empty: not served
    otlp_endpoint: str = ""  # URL of a collector for spans; empty: nothing is traced
    trace_sample_ratio: float = 1.0  # part of the calls that is traced where the client's trace does not say
    ready_file: Path | None = None
    drain_grace_s: float = 30.0  # how long running requests may go on after SIGTERM
    log_level: str = "info"

    def __post_init__(self) -> None:
        minimums = {
            "receive_bytes_max": 1,
            "scheduler_wait_ms": 0,
            "heartbeat_ms": 1,
            "detach_grace_ms": 0,
            "slow_reader_ms": 0,
            "unread_tokens_max": 1,
            "max_concurrent_requests": 1,
            "max_requests_per_principal": 0,
            "max_concurrent_tokens": 0,
            "max_tokens_per_principal": 0,
            "drain_grace_s": 0,
        }
        check_minimums(self, minimums)
        check_targets("scheduler", self.scheduler)
        check_otlp_endpoint(self.otlp_endpoint)
        check_sample_ratio(self.trace_sample_ratio)
        for name in ("model", "listen"):
            if not getattr(self, name):
                raise ConfigError(f"{name} must not be empty")
        knows_callers = self.access.tokens is not None or self.tls_client_ca is not None
        if self.engine_listen and knows_callers and not is_local(self.engine_listen):
            raise ConfigError(
                f"engine_listen {self.engine_listen} would answer everybody, past tokens and certificates, which its protocol does not have: "
                f"listen on 127.0.0.1 or unix:/PATH, where only what runs beside the gateway gets in"
            )
