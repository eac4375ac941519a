"""The kernels that can be tried on this machine."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from model_worker.graphs.device_recorder import DeviceRecorder
from model_worker.graphs.recorder import Recorder
from model_worker.kernels.interface import Kernels
from model_worker.kernels.torch_device_backend import TorchDeviceKernels
from model_worker.models.model_config import ModelConfig
from model_worker.placement import ON_CPU, Placement
from tessera.values.config import ConfigError
from tests.model_worker.run_again import RunAgain


@dataclass(frozen=True, slots=True)
class Backend:
    """`make` gives kernels of a dtype; `obstacle` says why they cannot serve a model, if so."""

    name: str
    make: Callable[[torch.dtype], Kernels]
    obstacle: Callable[[ModelConfig], str | None] = lambda shape: None


@dataclass(frozen=True, slots=True)
class Machine:
    """`name` of its GPU, or that there is none; what can be tried, and in `missing` why the rest cannot."""

    name: str
    device: torch.device
    backends: tuple[Backend, ...]
    missing: tuple[str, ...]

    @property
    def is_gpu(self) -> bool:
        """Whether figures mean anything."""
        return self.device.type == "cuda"

    def recorder(self) -> Recorder:
        """Real graphs on a GPU; elsewhere what is recorded runs again."""
        return DeviceRecorder(self.device) if self.is_gpu else RunAgain()

    def wait(self) -> None:
        """For what was started."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)


def this_machine() -> Machine:
    """Whatever is missing is said, not raised."""
    if not torch.cuda.is_available():
        plain = Backend("torch", lambda dtype: TorchDeviceKernels(placement=Placement(ON_CPU.device, dtype)))
        return Machine("no GPU", ON_CPU.device, (plain,), ("no GPU is here: only the CPU half was run",))
    device = torch.device("cuda", 0)
    plain = Backend("torch", lambda dtype: TorchDeviceKernels(placement=Placement(device, dtype)))
    try:
        others, missing = _aiter(device), ()
    except (ConfigError, ImportError) as error:
        others, missing = (), (f"AITER cannot be tried: {error}",)
    return Machine(torch.cuda.get_device_name(device), device, (plain, *others), missing)


def _aiter(device: torch.device) -> tuple[Backend, ...]:
    from model_worker.kernels.aiter import probe
    from model_worker.kernels.aiter.library import AiterLibrary
    from model_worker.kernels.aiter.native_backend import AiterNativeKernels
    from model_worker.kernels.aiter.probe import Demand, native_obstacle
    from model_worker.kernels.aiter.triton_backend import AiterTritonKernels

    if torch.version.hip is None:
        from tests.gpu import aiter_on_nvidia

        library = aiter_on_nvidia.load(Path(tempfile.mkdtemp(prefix="aiter-on-nvidia-")))
        return (Backend("aiter-triton", lambda dtype: AiterTritonKernels(library, Placement(device, dtype))),)
    library = AiterLibrary.for_device(device)
    return (
        Backend("aiter-triton", lambda dtype: AiterTritonKernels(library, Placement(device, dtype))),
        Backend(
            "aiter-native",
            lambda dtype: AiterNativeKernels(library, Placement(device, dtype)),
            lambda shape: native_obstacle(shape, Demand(torch.bfloat16, torch.bfloat16, 16), probe.Machine.of(library)),
        ),
    )
