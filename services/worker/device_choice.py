"""Where a worker computes and with which kernels: what was asked for, on the machine that is there."""

from collections.abc import Callable
from dataclasses import dataclass

import structlog
import torch

from model_worker.kernels.cpu.library import multiplies_bfloat16, needs_compiling, what_is_missing
from services.worker.config import WorkerConfig
from services.worker.device_config import AUTO
from tessera.values.config import ConfigError

_log = structlog.get_logger()


def _lacks_cpu_kernels() -> str | None:
    if needs_compiling():
        _log.info("kernels for this processor are compiled: up to a minute, once")
    return what_is_missing()


@dataclass(frozen=True, slots=True)
class Hardware:
    """What torch sees: GPUs, and whether they are AMD's (ROCm). `lacks_cpu_kernels`: why there are no kernels of our own for its processor, None
    if there are; asked only where it matters, since it may compile them. `multiplies_bfloat16`: whether that processor multiplies such numbers faster
    than others, by these kernels."""

    num_gpus: int
    is_rocm: bool
    lacks_cpu_kernels: Callable[[], str | None] = _lacks_cpu_kernels
    multiplies_bfloat16: bool = False

    @classmethod
    def found(cls) -> "Hardware":
        """Of this process."""
        return cls(torch.cuda.device_count(), torch.version.hip is not None, multiplies_bfloat16=multiplies_bfloat16())


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """`device` is cpu or cuda; `kernels` is torch, cpu, or one of the three words for AITER's. `lacks`: why these are torch's, where faster ones
    would have been chosen. `multiplies_bfloat16`: see `Hardware`."""

    device: str
    kernels: str
    lacks: str | None = None
    multiplies_bfloat16: bool = False

    @property
    def is_gpu(self) -> bool:
        """Whether the model lies on a GPU."""
        return self.device == "cuda"

    def device_of(self, rank: int) -> torch.device:
        """Each rank of a worker has a GPU of its own, or the CPU with the others."""
        return torch.device("cuda", rank) if self.is_gpu else torch.device("cpu")


def choose_device(config: WorkerConfig, hardware: Hardware, *, computes: bool = True) -> DeviceChoice:
    """`computes`: the model has weights; one without stays on the CPU. Raises ConfigError, which names the option and what to do."""
    asked = config.compute
    device, kernels, lacks = asked.device, asked.kernels, None
    if device == AUTO:
        device = "cuda" if computes and hardware.num_gpus and not config.batch_invariant else "cpu"
    if kernels == AUTO:
        if device == "cuda":
            kernels = "aiter" if hardware.is_rocm else "torch"
        else:
            lacks = hardware.lacks_cpu_kernels() if computes else None
            kernels = "cpu" if computes and lacks is None else "torch"
    choice = DeviceChoice(device, kernels, lacks, hardware.multiplies_bfloat16)
    if choice.is_gpu:
        _check_gpu(config, hardware, computes=computes)
    if kernels == "cpu":
        _check_cpu_kernels(config, choice)
    elif kernels == "torch":
        _check_torch_kernels(config, choice)
    else:
        _check_aiter(choice, hardware)
        _check_8_bits(config, choice)
    return choice


def _check_gpu(config: WorkerConfig, hardware: Hardware, *, computes: bool) -> None:
    if not computes:
        raise ConfigError(f"device cuda is of no use to {config.model}, which computes nothing: use device cpu")
    if not hardware.num_gpus:
        raise ConfigError("device cuda needs a GPU, and torch sees none: use device cpu")
    if config.tensor_parallel_size > hardware.num_gpus:
        raise ConfigError(
            f"device cuda needs a GPU for each of {config.tensor_parallel_size} ranks, and torch sees {hardware.num_gpus}: "
            f"lower tensor_parallel_size, or use device cpu"
        )
    if config.batch_invariant:
        raise ConfigError("batch_invariant is proved for CPUs alone, where bits are compared: use device cpu, or leave it out")


def _check_aiter(choice: DeviceChoice, hardware: Hardware) -> None:
    if not hardware.is_rocm:
        obstacle = "this torch is not for ROCm"
    elif not choice.is_gpu:
        obstacle = "device is cpu" if hardware.num_gpus else "torch sees no GPU"
    else:
        return
    raise ConfigError(f"kernels {choice.kernels} needs an AMD GPU and torch for ROCm, and {obstacle}: use kernels torch")


def _check_cpu_kernels(config: WorkerConfig, choice: DeviceChoice) -> None:
    if choice.is_gpu:
        raise ConfigError("kernels cpu are for processors, and device is cuda: use device cpu, or kernels torch")
    asked = config.compute
    if asked.quantization not in ("none", "int8"):
        raise ConfigError(f"quantization {asked.quantization} needs AITER's kernels: kernels cpu have none and int8")
    _check_kv_cache(config)
    _check_without_gpu(config)


def _check_torch_kernels(config: WorkerConfig, choice: DeviceChoice) -> None:
    _check_without_aiter(config, choice)
    if choice.is_gpu:
        return
    if config.compute.dtype not in (AUTO, "float32"):
        asked = config.compute.dtype
        raise ConfigError(
            f"dtype {asked} is for GPUs: on a CPU torch computes in float32, so leave it out, or {_use_cpu(choice)}"
        )
    _check_without_gpu(config)


def _check_kv_cache(config: WorkerConfig) -> None:
    if config.compute.kv_cache_dtype == "fp8":
        raise ConfigError("kv_cache_dtype fp8 needs AITER's kernels: use kv_cache_dtype auto, or kernels aiter on an AMD GPU")


def _check_8_bits(config: WorkerConfig, choice: DeviceChoice) -> None:
    if config.compute.quantization == "int8":
        raise ConfigError(f"quantization int8 needs kernels cpu: use quantization none, or {_use_cpu(choice)}")


def _use_cpu(choice: DeviceChoice) -> str:
    """What to do for them."""
    return "use kernels cpu" if choice.lacks is None else f"have kernels cpu, of which it is said here: {choice.lacks}"


def _check_without_aiter(config: WorkerConfig, choice: DeviceChoice) -> None:
    asked = config.compute
    _check_kv_cache(config)
    _check_8_bits(config, choice)
    if asked.quantization != "none":
        raise ConfigError(
            f"quantization {asked.quantization} needs AITER's kernels: use quantization none, or kernels aiter on an AMD GPU"
        )


def _check_without_gpu(config: WorkerConfig) -> None:
    asked = config.compute
    if asked.graph_sizes:
        raise ConfigError("graph_sizes is for GPUs: on a CPU nothing is recorded, so leave it out")
    if asked.enforce_eager:
        raise ConfigError("enforce_eager is for GPUs: on a CPU nothing is recorded, so leave it out")
    if asked.gpu_memory_utilization is not None:
        raise ConfigError("gpu_memory_utilization is for GPUs: on a CPU give kv_cache_bytes, or nothing")


def compute_dtype(asked: str, choice: DeviceChoice, stored: torch.dtype) -> torch.dtype:
    """What weights and activations are in (with kernels cpu the weights alone), `asked` being the option and `stored` what the model's files have.
    AITER's kernels know no float32."""
    if asked != AUTO:
        dtype: torch.dtype = getattr(torch, asked)
        if dtype == torch.float32 and choice.kernels not in ("torch", "cpu"):
            raise ConfigError(
                f"dtype float32 is unknown to kernels {choice.kernels}: use bfloat16 or float16, or kernels torch"
            )
        return dtype
    if not choice.is_gpu:
        return _cpu_dtype(choice, stored) if choice.kernels == "cpu" else torch.float32
    if stored == torch.float32 and choice.kernels != "torch":
        return torch.bfloat16
    return stored


def _cpu_dtype(choice: DeviceChoice, stored: torch.dtype) -> torch.dtype:
    """16 bits: those that the processor multiplies fastest, unless the files have the others."""
    return torch.bfloat16 if choice.multiplies_bfloat16 and stored != torch.float16 else torch.float16
