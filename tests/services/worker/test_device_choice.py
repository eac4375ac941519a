"""Where a worker computes: what follows from its options on a machine, and which of them exclude each other."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from services.worker.config import WorkerConfig
from services.worker.device_choice import DeviceChoice, Hardware, choose_device, compute_dtype
from services.worker.device_config import DeviceConfig
from tessera.values.config import ConfigError

CPU, NVIDIA, AMD = (Hardware(count, is_rocm, lambda: None) for count, is_rocm in ((0, False), (2, False), (2, True)))
BARE = Hardware(0, is_rocm=False, lacks_cpu_kernels=lambda: "there is no compiler: get one")
CONFIG = WorkerConfig(model="m")


def chosen(hardware: Hardware, **options: Any) -> tuple[str, str]:
    choice = choose_device(replace(CONFIG, compute=DeviceConfig(**options)), hardware)
    return choice.device, choice.kernels


def test_what_is_best_on_a_machine_is_chosen() -> None:
    assert chosen(CPU) == ("cpu", "cpu")
    assert chosen(CPU, kernels="torch") == ("cpu", "torch")
    assert chosen(CPU, dtype="float16", quantization="int8") == ("cpu", "cpu")
    assert chosen(NVIDIA) == ("cuda", "torch")
    assert chosen(AMD) == ("cuda", "aiter")
    assert chosen(AMD, kernels="torch") == ("cuda", "torch")
    assert chosen(AMD, device="cpu") == ("cpu", "cpu")
    assert chosen(AMD, kernels="aiter-native", kv_cache_dtype="fp8", quantization="fp8") == ("cuda", "aiter-native")


def test_where_the_kernels_for_a_processor_are_missing_torch_computes_and_it_is_said_why() -> None:
    assert choose_device(CONFIG, BARE) == DeviceChoice("cpu", "torch", "there is no compiler: get one")


def test_what_is_missing_is_not_asked_where_it_does_not_matter() -> None:
    """To find out may take a minute."""

    def never() -> str:
        raise AssertionError("asked")

    assert chosen(Hardware(1, is_rocm=False, lacks_cpu_kernels=never)) == ("cuda", "torch")
    assert chosen(Hardware(0, is_rocm=False, lacks_cpu_kernels=never), kernels="torch") == ("cpu", "torch")
    assert choose_device(CONFIG, Hardware(0, False, never), computes=False) == DeviceChoice("cpu", "torch")


def test_what_has_no_use_for_a_gpu_stays_on_the_cpu() -> None:
    assert choose_device(CONFIG, AMD, computes=False) == DeviceChoice("cpu", "torch")
    assert choose_device(replace(CONFIG, batch_invariant=True), AMD) == DeviceChoice("cpu", "cpu")


def test_each_rank_has_a_gpu_of_its_own() -> None:
    assert DeviceChoice("cuda", "torch").device_of(1) == torch.device("cuda", 1)
    assert DeviceChoice("cpu", "torch").device_of(1) == torch.device("cpu")


@pytest.mark.parametrize(
    ("hardware", "options", "worker", "message"),
    [
        (CPU, {"device": "cuda"}, {}, "device cuda needs a GPU, and torch sees none: use device cpu"),
        (AMD, {"device": "cuda"}, {"tensor_parallel_size": 4}, "a GPU for each of 4 ranks, and torch sees 2"),
        (AMD, {"device": "cuda"}, {"batch_invariant": True}, "batch_invariant is proved for CPUs alone.*: use device cpu"),
        (CPU, {"kernels": "aiter"}, {}, "kernels aiter needs an AMD GPU .*, and this torch is not for ROCm: use kernels torch"),
        (Hardware(0, is_rocm=True), {"kernels": "aiter"}, {}, "kernels aiter needs .*, and torch sees no GPU: use kernels"),
        (NVIDIA, {"kernels": "aiter-triton"}, {}, "kernels aiter-triton needs .* torch is not for ROCm"),
        (AMD, {"device": "cpu", "kernels": "aiter"}, {}, "kernels aiter needs .*, and device is cpu: use kernels torch"),
        (CPU, {"kv_cache_dtype": "fp8"}, {}, "kv_cache_dtype fp8 needs AITER's kernels: use kv_cache_dtype auto"),
        (NVIDIA, {"quantization": "fp8_block"}, {}, "quantization fp8_block needs AITER's kernels: use quantization none"),
        (
            CPU,
            {"kernels": "torch", "dtype": "float16"},
            {},
            "dtype float16 is for GPUs: .* float32, so leave it out, or use kernels cpu",
        ),
        (BARE, {"dtype": "float16"}, {}, "dtype float16 is for GPUs: .* or have kernels cpu, .* there is no compiler: get one"),
        (BARE, {"quantization": "int8"}, {}, "quantization int8 needs kernels cpu: .* there is no compiler: get one"),
        (AMD, {"kernels": "cpu"}, {}, "kernels cpu are for processors, and device is cuda: use device cpu"),
        (
            CPU,
            {"kernels": "cpu", "quantization": "fp8"},
            {},
            "quantization fp8 needs AITER's kernels: kernels cpu have none and int8",
        ),
        (CPU, {"kernels": "cpu", "kv_cache_dtype": "fp8"}, {}, "kv_cache_dtype fp8 needs AITER's kernels"),
        (CPU, {"kernels": "cpu", "graph_sizes": (4,)}, {}, "graph_sizes is for GPUs"),
        (CPU, {"kernels": "torch", "quantization": "int8"}, {}, "quantization int8 needs kernels cpu"),
        (CPU, {"quantization": "fp8"}, {}, "quantization fp8 needs AITER's kernels: kernels cpu have none and int8"),
        (AMD, {"quantization": "int8"}, {}, "quantization int8 needs kernels cpu"),
        (CPU, {"graph_sizes": (4,)}, {}, "graph_sizes is for GPUs: on a CPU nothing is recorded"),
        (CPU, {"enforce_eager": True}, {}, "enforce_eager is for GPUs: on a CPU nothing is recorded"),
        (CPU, {"gpu_memory_utilization": 0.5}, {}, "gpu_memory_utilization is for GPUs: on a CPU give kv_cache_bytes"),
    ],
)
def test_what_cannot_be_names_the_option_and_what_to_do(
    hardware: Hardware, options: dict[str, Any], worker: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_device(replace(CONFIG, compute=DeviceConfig(**options), **worker), hardware)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda, got 'tpu'"),
        ({"kernels": "best"}, "kernels must be one of auto, torch, cpu, aiter, aiter-triton, aiter-native, got 'best'"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype must be one of auto, fp8"),
        ({"quantization": "int4"}, "quantization must be one of none, fp8, fp8_block"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization must be above 0 and at most 1, got 1.5"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization must be above 0 and at most 1, got nan"),
        ({"graph_sizes": (8, 0)}, "graph_sizes must be at least 1, got 0"),
        ({"graph_sizes": (8,), "enforce_eager": True}, "enforce_eager and graph_sizes exclude each other"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DeviceConfig(**options)


def test_the_kv_cache_has_one_size() -> None:
    with pytest.raises(ConfigError, match="kv_cache_bytes and gpu_memory_utilization both say how large the KV cache is"):
        replace(CONFIG, kv_cache_bytes=1 << 20, compute=DeviceConfig(gpu_memory_utilization=0.5))


def test_numbers_are_the_files_own_on_a_gpu() -> None:
    cpu, torch_gpu, aiter = DeviceChoice("cpu", "torch"), DeviceChoice("cuda", "torch"), DeviceChoice("cuda", "aiter")
    assert compute_dtype("auto", cpu, torch.bfloat16) == torch.float32
    assert compute_dtype("auto", DeviceChoice("cpu", "cpu"), torch.float32) == torch.float16
    assert compute_dtype("float32", DeviceChoice("cpu", "cpu"), torch.float16) == torch.float32
    fast = choose_device(CONFIG, replace(CPU, multiplies_bfloat16=True))
    assert compute_dtype("auto", fast, torch.float32) == torch.bfloat16 == compute_dtype("auto", fast, torch.bfloat16)
    assert compute_dtype("auto", fast, torch.float16) == torch.float16 == compute_dtype("float16", fast, torch.float32)
    assert compute_dtype("auto", torch_gpu, torch.float32) == torch.float32
    assert compute_dtype("auto", torch_gpu, torch.float16) == torch.float16
    assert compute_dtype("auto", aiter, torch.float16) == torch.float16
    assert compute_dtype("auto", aiter, torch.float32) == torch.bfloat16
    assert compute_dtype("float32", torch_gpu, torch.bfloat16) == torch.float32
    with pytest.raises(ConfigError, match="dtype float32 is unknown to kernels aiter: use bfloat16 or float16"):
        compute_dtype("float32", aiter, torch.float32)
