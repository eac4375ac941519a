"""The kernels that a worker on an AMD GPU gets for a model, by what it asks for. Nothing is computed: no GPU is here."""

from dataclasses import replace

import pytest
import torch

from model_worker.group import ALONE
from model_worker.kernels.aiter.library import AiterLibrary, AiterUnavailable
from model_worker.kernels.aiter.native_backend import AiterNativeKernels
from model_worker.kernels.aiter.probe import Machine
from model_worker.kernels.aiter.triton_backend import AiterTritonKernels
from model_worker.kv_layout import SHUFFLED, TOKEN_MAJOR
from model_worker.models.model_config import ModelConfig
from services.worker.config import WorkerConfig
from services.worker.device_choice import DeviceChoice
from services.worker.device_config import DeviceConfig
from services.worker.model_kernels import ModelKernels, model_kernels
from tests.aiter.model_shapes import LLAMA

WIDE = replace(LLAMA, head_dim=128)


@pytest.fixture(autouse=True)
def on_an_amd_gpu(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AiterLibrary, "for_device", lambda device: AiterLibrary(arch))
    monkeypatch.setattr(Machine, "of", lambda library: Machine(library.arch, has_compiled=True))


def kernels_of(kernels: str, shape: ModelConfig, **compute: str) -> ModelKernels:
    config = WorkerConfig(model="m", compute=DeviceConfig(**compute))
    return model_kernels(config, DeviceChoice("cuda", kernels), shape, torch.bfloat16, ALONE)


def test_of_aiters_kernels_the_compiled_ones_are_taken_where_they_serve_the_model() -> None:
    native, triton = kernels_of("aiter", WIDE), kernels_of("aiter", LLAMA)
    assert isinstance(native.spread, AiterNativeKernels) and isinstance(native.draft, AiterNativeKernels)
    assert (native.store.flavour, native.store.layout) == ("aiter-native", SHUFFLED)
    assert isinstance(triton.spread, AiterTritonKernels) and isinstance(triton.alone, AiterTritonKernels)
    assert (triton.store.flavour, triton.store.layout) == ("aiter-triton", TOKEN_MAJOR)


def test_a_flavour_that_was_asked_for_is_taken_or_refused() -> None:
    assert isinstance(kernels_of("aiter-triton", WIDE).spread, AiterTritonKernels)
    assert isinstance(kernels_of("aiter-native", WIDE).spread, AiterNativeKernels)
    with pytest.raises(AiterUnavailable, match=r"kernels aiter-native: .*128 elements.*choose kernels aiter-triton"):
        kernels_of("aiter-native", LLAMA)


@pytest.mark.each_arch
def test_an_eight_bit_cache_has_the_floats_of_the_gpu(arch: str) -> None:
    for kernels in ("aiter", "aiter-triton"):
        store = kernels_of(kernels, WIDE, kv_cache_dtype="fp8").store
        assert store.dtype == (torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn)
