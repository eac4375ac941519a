"""The clusters and loads that scenarios run on."""

from dataclasses import dataclass, replace

from tests.chaos.asks import Ask, make_asks

MODEL = "SmolLM2-135M-Instruct"
LEASE_MS = 2000
RETENTION_MS = 500
"""Results stay readable this long: short, so that every scenario sees the end of it."""


@dataclass(frozen=True, slots=True)
class Setup:
    """One cluster and what is asked of it."""

    name: str
    model: str  # the workers'
    kv_cache_bytes: int  # of each worker
    concurrency: int  # streams at a time
    asks: tuple[Ask, ...]
    schedulers: int = 2
    workers: int = 2
    gateways: int = 2
    worker_options: tuple[str, ...] = ()
    scheduler_options: tuple[str, ...] = ()
    gateway_options: tuple[str, ...] = ()
    scenarios: tuple[str, ...] = ()  # that a run without names plays on it; empty: all
    has_pause_budget: bool = True  # one with requests that wait for blocks has none
    recompute_s: float = (
        0.0  # what the model itself takes to compute again what a lost worker held: no budget of ours can be shorter
    )
    lease_ms: int = LEASE_MS

    @property
    def is_deterministic(self) -> bool:
        """Whether two runs must be equal to the last token."""
        return self.model.startswith("deterministic")


def deterministic(streams: int = 256, max_tokens: int = 140) -> Setup:
    """Tokens hash the KV that is really read, so a wrong block shows. Each worker can hold all streams, but not all that they leave behind."""
    asks = tuple(make_asks(streams * 5 // 4, 30, max_tokens, seed=11))
    return Setup(
        name="deterministic",
        model=f"deterministic:{MODEL}",
        kv_cache_bytes=streams * 240 * 8,  # 8 bytes per position
        concurrency=streams,
        asks=asks,
        worker_options=("--max-num-batched-tokens", "4096"),  # as a GPU would: the default suits the speed of a CPU
    )


def tight(streams: int = 64) -> Setup:
    """The same model in a pool for a third of the streams: waiting, preemption and eviction all the time."""
    asks = tuple(make_asks(streams * 3 // 2, 60, 200, seed=12))
    return Setup(
        name="tight",
        model=f"deterministic:{MODEL}",
        kv_cache_bytes=streams * 60 * 8,
        concurrency=streams,
        asks=asks,
        scenarios=(
            "kill-leader",
            "kill-worker",
            "kill-leader-and-worker",
            "kill-everything",
            "freeze-leader",
            "freeze-worker",
            "redis-empty-then-kill-leader",
            "random-kills",
        ),
        has_pause_budget=False,
    )


def swapping(streams: int = 64) -> Setup:
    """The tight pool again, with host memory for a third of what has to make room: some is swapped out and back, the rest computed again."""
    return replace(
        tight(streams),
        name="swapping",
        worker_options=("--swap-bytes", str(streams * 40 * 8)),
        scheduler_options=("--preemption-mode", "swap", "--secure-zero"),
        scenarios=("kill-leader", "kill-worker", "kill-leader-and-worker", "freeze-worker", "random-kills"),
    )


def cpu(streams: int = 16) -> Setup:
    """The real model, one thread per worker."""
    asks = tuple(make_asks(streams * 3 // 2, 16, 48, seed=13))
    return Setup(
        name="cpu",
        model=MODEL,
        kv_cache_bytes=160 * 1024 * 1024,  # 46,080 bytes per position
        concurrency=streams,
        asks=asks,
        worker_options=("--threads", "1", "--dtype", "float32"),  # what it computes is compared with torch's
        recompute_s=3.0,  # half of the streams with some 120 tokens each, at 300 a second
    )


SETUPS = {"deterministic": deterministic, "tight": tight, "swapping": swapping, "cpu": cpu}
