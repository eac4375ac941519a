"""The kernels that a worker computes with, as its options and the machine have it."""

from dataclasses import dataclass

import structlog
import torch

from model_worker.group import ALONE, Group
from model_worker.kernels.cpu.backend import CpuKernels, can_read_cache, is_all_ours
from model_worker.kernels.cpu.library import KernelsMissing, cpu_library
from model_worker.kernels.interface import Kernels
from model_worker.kernels.invariant_backend import InvariantKernels, ask_mkl_for_invariance
from model_worker.kernels.quantization import Quantization
from model_worker.kernels.torch_backend import TorchKernels
from model_worker.kernels.torch_device_backend import TorchDeviceKernels
from model_worker.kv_pool import KVStore
from model_worker.models.model_config import ModelConfig
from model_worker.placement import Placement
from services.worker.config import WorkerConfig
from services.worker.device_choice import DeviceChoice, compute_dtype
from services.worker.device_config import AUTO
from tessera.values.config import ConfigError

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, eq=False)
class ModelKernels:
    """Of one model on one rank: `spread` for what all ranks of the worker run, `draft` for heads, which each worker has whole, `alone` for what one
    rank runs by itself. `store` is how its KV pools keep numbers."""

    spread: Kernels
    draft: Kernels
    alone: Kernels
    store: KVStore


def model_kernels(
    config: WorkerConfig, choice: DeviceChoice, shape: ModelConfig, stored: torch.dtype, group: Group, peers: Group = ALONE
) -> ModelKernels:
    """For a model of this shape, whose files have numbers of dtype `stored`. Raises ConfigError: AITER may be missing, or lack what the
    model needs."""
    if choice.kernels == "cpu" and config.batch_invariant and not is_all_ours(shape, config.block_size):
        choice = _torch_instead(config, choice)
    dtype = compute_dtype(config.compute.dtype, choice, stored)
    if choice.kernels == "cpu":
        return _cpu_kernels(config, shape, dtype, group, peers)
    placement = Placement(choice.device_of(group.rank), dtype)
    if choice.kernels != "torch":
        return _aiter_kernels(config, choice, shape, placement, group, peers)
    groups = (group, peers), (group, ALONE), (ALONE, ALONE)
    if config.batch_invariant:
        ask_mkl_for_invariance()
        made: list[Kernels] = [InvariantKernels(*each) for each in groups]
    else:
        kind = TorchDeviceKernels if choice.is_gpu else TorchKernels
        made = [kind(*each, placement) for each in groups]
    return ModelKernels(made[0], made[1], made[2], made[0].kv_store())


def _torch_instead(config: WorkerConfig, choice: DeviceChoice) -> DeviceChoice:
    """For a model of which not every sum is by our own kernels, where each has to be the same bits in any batch. Raises ConfigError where what was
    asked for needs them."""
    asked = config.compute
    for option, given, usual in (
        ("kernels", asked.kernels, AUTO),
        ("dtype", asked.dtype, "float32"),
        ("quantization", asked.quantization, "none"),
    ):
        if given not in (AUTO, usual):
            raise ConfigError(
                f"batch_invariant is for this model with torch's kernels in float32, since it has experts, windows or latents, or block_size is no "
                f"multiple of 16; {option} is {given}: leave {option} out"
            )
    _log.info("torch's kernels are used: of this model not every sum is by kernels cpu", batch_invariant=True)
    return DeviceChoice(choice.device, "torch")


def _cpu_kernels(config: WorkerConfig, shape: ModelConfig, dtype: torch.dtype, group: Group, peers: Group) -> ModelKernels:
    try:
        library = cpu_library(torch.get_num_threads())
    except KernelsMissing as error:
        raise ConfigError(f"kernels cpu: {error}. Use kernels torch") from error
    reads_cache = can_read_cache(shape, config.block_size)
    _log.info("compiled kernels are used", isa=library.isa, weights=str(dtype).removeprefix("torch."), attention=reads_cache)
    groups = (group, peers), (group, ALONE), (ALONE, ALONE)
    in_8_bits = config.compute.quantization == "int8"
    made = [CpuKernels(library, dtype, *each, in_8_bits=in_8_bits, reads_cache=reads_cache) for each in groups]
    return ModelKernels(made[0], made[1], made[2], made[0].kv_store())


def _aiter_kernels(
    config: WorkerConfig, choice: DeviceChoice, shape: ModelConfig, placement: Placement, group: Group, peers: Group
) -> ModelKernels:
    from model_worker.kernels.aiter.library import AiterLibrary  # none of this without ROCm
    from model_worker.kernels.aiter.native_backend import AiterNativeKernels
    from model_worker.kernels.aiter.probe import Demand, Flavour, Machine, choose_flavour, require_native
    from model_worker.kernels.aiter.triton_backend import AiterTritonKernels

    library = AiterLibrary.for_device(placement.device)
    kv_dtype = library.fp8 if config.compute.kv_cache_dtype == "fp8" else placement.dtype
    demand = Demand(placement.dtype, kv_dtype, config.block_size, group)
    if choice.kernels == "aiter":
        chosen = choose_flavour(shape, demand, Machine.of(library))
        flavour = chosen.flavour
        _log.info("aiter's kernels are chosen", kernels=flavour.value, reason=chosen.reason)
    else:
        flavour = Flavour(choice.kernels)
        if flavour is Flavour.NATIVE:
            require_native(shape, demand, Machine.of(library))
    kind = AiterNativeKernels if flavour is Flavour.NATIVE else AiterTritonKernels
    quantization = Quantization(config.compute.quantization)
    made = [kind(library, placement, quantization, *each) for each in ((group, peers), (group, ALONE), (ALONE, ALONE))]
    return ModelKernels(made[0], made[1], made[2], made[0].kv_store(kv_dtype))
