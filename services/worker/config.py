"""Configuration of one worker process, validated once."""

from dataclasses import dataclass, field, fields
from pathlib import Path

from services.rpc.access_config import AccessConfig
from services.rpc.tracing import check_otlp_endpoint
from services.worker.device_config import DeviceConfig
from tessera.values.config import ConfigError, check_choices, check_minimums

PROPOSERS = ("ngram", "mtp", "draft_model", "eagle")
"""Who makes drafts: `ngram` looks for what the last tokens were followed by when they came before; `mtp` are the model's own layers for it;
`draft_model` is a smaller model; `eagle` is an EAGLE or EAGLE-3 head on the model's hidden states."""

WITH_FILES = ("draft_model", "eagle")
"""Proposers that come from files of their own."""

VERIFICATIONS = ("coupled", "rejection")
"""Which drafts stand: `coupled` those that are what the model draws with its own noise, which changes no token; `rejection` those that rejection
sampling accepts, which changes tokens and not their distribution."""


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """How a worker guesses tokens ahead."""

    num_speculative_tokens: int = 0  # most drafts of one sequence per step; the scheduler may allow fewer; 0 is off
    proposer: str = "ngram"  # one of PROPOSERS
    draft_model: str | None = None  # what a proposer of WITH_FILES is loaded from: as the worker's `model`
    ngram_min: int = 2  # tokens that must have come before, at least
    ngram_max: int = 4  # tokens that are compared, at most
    verification: str = "coupled"  # one of VERIFICATIONS

    def __post_init__(self) -> None:
        check_minimums(self, {"num_speculative_tokens": 0, "ngram_min": 1, "ngram_max": 1})
        check_choices(self, {"proposer": PROPOSERS, "verification": VERIFICATIONS})
        if self.proposer in WITH_FILES and not self.draft_model:
            raise ConfigError(f"draft_model must say what proposer {self.proposer} is to load")
        if self.draft_model and self.proposer not in WITH_FILES:
            raise ConfigError(
                f"draft_model is given, but proposer {self.proposer} takes none: set proposer to {' or '.join(WITH_FILES)}"
            )
        if self.ngram_max < self.ngram_min:
            raise ConfigError(
                f"ngram_max ({self.ngram_max}) must be at least ngram_min ({self.ngram_min}): raise it, or lower ngram_min"
            )
        given = [item.name for item in fields(self) if getattr(self, item.name) != item.default]
        if given and not self.num_speculative_tokens:
            raise ConfigError(f"{given[0]} is given, but num_speculative_tokens is 0: set it to the drafts per step, 1 or more")

    @property
    def rejects(self) -> bool:
        """Whether drafts are verified by rejection sampling."""
        return self.verification == "rejection"

    def check_invariance(self, batch_invariant: bool) -> None:
        """Raise ConfigError where tokens are to depend on drafts and on nothing that happens around a request."""
        if batch_invariant and self.rejects:
            raise ConfigError(
                "batch_invariant and verification rejection exclude each other, since tokens would depend on drafts: use verification coupled"
            )


@dataclass(frozen=True, slots=True)
class ExpertParallelConfig:
    """The workers of a lockstep group that share the experts of one model, each with requests of its own."""

    expert_parallel_size: int = 1  # workers
    expert_parallel_rank: int = 0  # which of them this one is, from 0
    expert_parallel_store: str = ""  # HOST:PORT where they find each other; number 0 listens there

    def __post_init__(self) -> None:
        check_minimums(self, {"expert_parallel_size": 1, "expert_parallel_rank": 0})
        if self.expert_parallel_rank >= self.expert_parallel_size:
            raise ConfigError(
                f"expert_parallel_rank ({self.expert_parallel_rank}) must be below expert_parallel_size ({self.expert_parallel_size})"
            )
        host, _, port = self.expert_parallel_store.rpartition(":")
        if self.expert_parallel_size > 1 and not (host and port.isdigit() and 0 < int(port) < 65536):
            raise ConfigError(
                f"expert_parallel_store must be host:port with a port from 1 to 65535, got {self.expert_parallel_store!r}"
            )


RANKS_MAX = 64
"""Ranks are processes of one machine; no model's heads can be spread over more for any good."""


def check_ranks(tensor_parallel_size: int) -> None:
    """Raise ConfigError for ranks that cannot be."""
    if not 1 <= tensor_parallel_size <= RANKS_MAX:
        raise ConfigError(f"tensor_parallel_size must be from 1 to {RANKS_MAX}, got {tensor_parallel_size}")


THREADS_MAX = 1024
"""More cores than any machine has for one worker; torch starts as many threads as it is told to, and ends the process where it cannot."""


KV_CACHE_BYTES = 512 * 1024 * 1024
"""Of a CPU's memory, where nobody says more."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What one worker serves, where, and with how much.

    `model` is a directory, a GGUF file or a known name; `deterministic` or `deterministic:NAME` computes nothing (see
    `model_worker.models.deterministic`). `ready_file` gets `{"address": ...}` once the model is loaded and served.
    """

    model: str
    listen: str = "127.0.0.1:50053"  # host:port, port 0 for any free one, or unix:/path
    kv_cache_bytes: int | None = None  # None: KV_CACHE_BYTES on a CPU, on a GPU what `gpu_memory_utilization` leaves
    swap_bytes: int = 0  # host memory for the KV of sequences that are swapped out; 0: nothing is
    block_size: int = 16  # tokens per block: 1 or a multiple of 16
    max_num_seqs: int = 256  # rows of one batch
    # Positions of one batch. A CPU computes some hundreds in a second, and a takeover, an abort and a new prompt wait for a started batch;
    # decodes as well, unless the scheduler has an `itl_target_ms`.
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None  # tokens, prompt and output; None: what the model was trained for
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    threads: int | None = None  # torch threads of each process; None: one per core this worker may use, in all
    tensor_parallel_size: int = 1  # processes that hold the model together, each a part of it
    experts: ExpertParallelConfig = field(default_factory=ExpertParallelConfig)
    compute: DeviceConfig = field(default_factory=DeviceConfig)
    batch_invariant: bool = False  # the same bits for a request in any batch, however its context was computed
    heartbeat_ms: int = 500
    drain_grace_s: float = 10.0  # after SIGTERM: how long its requests may take to go elsewhere, or to end
    access: AccessConfig = field(default_factory=AccessConfig)
    metrics_listen: str = ""  # host:port of /metrics; empty: not served
    otlp_endpoint: str = ""  # URL of a collector for spans; empty: nothing is traced
    ready_file: Path | None = None
    log_level: str = "info"

    def __post_init__(self) -> None:
        names = (
            "kv_cache_bytes",
            "block_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "threads",
            "heartbeat_ms",
        )
        if self.threads is not None and self.threads > THREADS_MAX:
            raise ConfigError(
                f"threads must be at most {THREADS_MAX}, got {self.threads}: more than cores only makes a batch slower"
            )
        check_minimums(self, {**dict.fromkeys(names, 1), "drain_grace_s": 0, "swap_bytes": 0})
        check_ranks(self.tensor_parallel_size)
        check_otlp_endpoint(self.otlp_endpoint)
        if self.block_size != 1 and self.block_size % 16:
            raise ConfigError(f"block_size must be 1 or a multiple of 16, got {self.block_size}")
        if self.kv_cache_bytes is not None and self.compute.gpu_memory_utilization is not None:
            raise ConfigError("kv_cache_bytes and gpu_memory_utilization both say how large the KV cache is: give one of them")
        self.speculation.check_invariance(self.batch_invariant)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs ({self.max_num_seqs}): "
                f"every running sequence needs its token in a step"
            )
