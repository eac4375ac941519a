"""Options of a worker that say where and in what numbers it computes."""

from dataclasses import dataclass

from tessera.values.config import ConfigError, check_choices

AUTO = "auto"

DEVICES = (AUTO, "cpu", "cuda")
"""`auto`: a GPU where torch sees one. ROCm's torch calls AMD GPUs `cuda` too."""

KERNELS = (AUTO, "torch", "cpu", "aiter", "aiter-triton", "aiter-native")
"""`auto`: `aiter` on ROCm, `cpu` on a CPU that has them, else `torch`. `cpu`: those of our own for x86 processors. `aiter`: of its two flavours the
one that fits GPU and model."""

DTYPES = (AUTO, "float32", "bfloat16", "float16")
"""`auto`: with kernels `cpu`, which sum in float32 whatever it is, bfloat16 where the processor has products of it (and the model's files are not in
float16), else float16; float32 with `torch` on a CPU; on a GPU what the model's files have."""

KV_CACHE_DTYPES = (AUTO, "fp8")
"""`auto`: that of the activations."""

QUANTIZATIONS = ("none", "fp8", "fp8_block", "int8")
"""Of linear layers: `fp8` with a scale per token and output, `fp8_block` with one per 128 numbers; `int8`, on a CPU, with one per 32, of the
embedding too."""

UTILIZATION = 0.9
"""Of a GPU's memory, where nobody says more. The rest is for what is not measured: pieces between allocations, and passes whose like was not tried."""


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """Where a worker computes. What depends on the machine is checked where it is known, see `services.worker.device_choice`."""

    device: str = AUTO  # one of DEVICES
    kernels: str = AUTO  # one of KERNELS
    dtype: str = AUTO  # one of DTYPES
    gpu_memory_utilization: float | None = None  # part of a GPU's memory that may be in use; None: UTILIZATION
    kv_cache_dtype: str = AUTO  # one of KV_CACHE_DTYPES
    quantization: str = "none"  # one of QUANTIZATIONS
    enforce_eager: bool = False  # no decode batch is recorded
    graph_sizes: tuple[int, ...] = ()  # rows of the decode batches that are recorded; none: the usual ones

    def __post_init__(self) -> None:
        check_choices(
            self,
            {
                "device": DEVICES,
                "kernels": KERNELS,
                "dtype": DTYPES,
                "kv_cache_dtype": KV_CACHE_DTYPES,
                "quantization": QUANTIZATIONS,
            },
        )
        used = self.gpu_memory_utilization
        if used is not None and not 0.0 < used <= 1.0:
            raise ConfigError(f"gpu_memory_utilization must be above 0 and at most 1, got {used}")
        if self.enforce_eager and self.graph_sizes:
            raise ConfigError("enforce_eager and graph_sizes exclude each other, since nothing is recorded: give one of them")
        if any(size < 1 for size in self.graph_sizes):
            raise ConfigError(f"graph_sizes must be at least 1, got {min(self.graph_sizes)}")
