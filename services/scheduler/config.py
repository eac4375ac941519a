"""Configuration of one scheduler process."""

from dataclasses import dataclass, field
from pathlib import Path

from services.rpc.access_config import AccessConfig
from services.rpc.addresses import check_targets
from services.rpc.tracing import check_otlp_endpoint
from tessera.values.config import Config, ConfigError, check_minimums


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Parsed once by the command line, then frozen.

    `listen` may have port 0: the bound address goes to the log and to `ready_file` (JSON with `address`) once serving.
    """

    workers: tuple[str, ...]  # host:port of each model worker, or dns:///name:port for all addresses of a name
    redis_url: str  # redis://host:port/db, unix:///path/to/socket or sentinel://host:port,host:port/service/db
    redis_password_file: Path | None = None  # holds the password that `redis_url` lacks; read at each connection
    listen: str = "127.0.0.1:50052"
    group: str = "default"  # names this scheduler's keys in Redis; one model, one pool of workers
    scheduling: Config = field(default_factory=Config)
    lease_ms: int = 2000  # how long a leader that says nothing keeps the lead; it renews four times as often
    hello_wait_ms: int = 800  # after a takeover with live requests: how long gateways have to say what they hold
    worker_silence_ms: int = 2000  # a worker that says nothing for this long is lost; its requests go on elsewhere
    access: AccessConfig = field(default_factory=AccessConfig)
    token_file: Path | None = None  # holds the token that workers know this scheduler by
    metrics_listen: str = ""  # host:port of /metrics; empty: not served
    otlp_endpoint: str = ""  # URL of a collector for spans; empty: nothing is traced
    ready_file: Path | None = None
    log_level: str = "info"

    def __post_init__(self) -> None:
        check_targets("workers", self.workers)
        check_otlp_endpoint(self.otlp_endpoint)
        if not self.group or any(c in "{}: " for c in self.group):
            raise ConfigError(f"group must be a name without braces, colons or spaces, got {self.group!r}")
        if not self.redis_url.startswith(("redis://", "rediss://", "unix://", "sentinel://")):
            raise ConfigError(f"redis_url must begin with redis://, rediss://, unix:// or sentinel://, got {self.redis_url!r}")
        check_minimums(self, {"lease_ms": 100, "hello_wait_ms": 0, "worker_silence_ms": 1})
