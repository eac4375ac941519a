"""What one `tessera up` runs and where."""

from dataclasses import dataclass, field
from pathlib import Path

from services.cli.public_access import PublicAccess
from services.rpc.tracing import check_otlp_endpoint, check_sample_ratio
from services.worker.config import SpeculationConfig, check_ranks
from tessera.values.config import Config, ConfigError

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
DEFAULT_LISTEN = "127.0.0.1:50051"

DRAFTS_MAX = Config().max_num_batched_tokens // Config().max_num_seqs - 1
"""The scheduler's own bound, with the defaults of what `tessera up` has no option for."""


@dataclass(frozen=True, slots=True)
class UpConfig:
    """Parsed once by the command line, then frozen."""

    model: str = DEFAULT_MODEL
    listen: str = DEFAULT_LISTEN
    http: str = ""  # where OpenAI's and Anthropic's HTTP APIs are served as well; empty: nowhere
    data: Path = Path("data")
    redis_url: str | None = None  # None: an embedded server below `data`
    prompt: str = "What is the capital of France? Answer in one sentence."  # empty: ask nothing
    once: bool = False
    batch_invariant: bool = False  # see the worker's
    tensor_parallel_size: int = 1  # see the worker's
    otlp_endpoint: str = ""  # see the gateway's, as the next one; of all parts
    trace_sample_ratio: float = 1.0
    start_timeout_s: float = 300.0
    public: PublicAccess = field(default_factory=PublicAccess)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)

    def __post_init__(self) -> None:
        for name, address in (("listen", self.listen), ("http", self.http or self.listen)):
            host, _, port = address.rpartition(":")
            if not host or not port.isdigit() or not 0 < int(port) < 65536:
                raise ConfigError(f"{name} must be host:port with a port from 1 to 65535, got {address!r}")
        check_otlp_endpoint(self.otlp_endpoint)
        check_sample_ratio(self.trace_sample_ratio)
        if self.start_timeout_s <= 0:
            raise ConfigError(f"start_timeout_s must be positive, got {self.start_timeout_s}")
        self.speculation.check_invariance(self.batch_invariant)
        check_ranks(self.tensor_parallel_size)
        if self.public.tokens is not None and self.public.token_file is None and self.prompt:
            raise ConfigError("tokens are given, but no token_file to ask the question with: give one, or an empty prompt")
        if self.once and not self.prompt:
            raise ConfigError("once ends after the answer, so it needs a prompt")
        if self.speculation.num_speculative_tokens > DRAFTS_MAX:
            raise ConfigError(
                f"num_speculative_tokens must be at most {DRAFTS_MAX}, got {self.speculation.num_speculative_tokens}: "
                f"a step has room for no more with every running request"
            )


def host_and_port(address: str) -> tuple[str, int]:
    """Of `listen` or `http`."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
