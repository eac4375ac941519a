"""The port to a GPU's memory, as it is measured before a KV pool is reserved."""

import gc
from typing import Protocol

import torch


class DeviceMemory(Protocol):
    """Of one device, in bytes. `held` is what torch has taken of it in this process, used or kept for later."""

    @property
    def total(self) -> int:
        """All there is."""
        ...

    def free(self) -> int:
        """What no process has taken."""
        ...

    def held(self) -> int:
        """By now."""
        ...

    def peak_held(self) -> int:
        """The most since `settle`."""
        ...

    def settle(self) -> None:
        """Wait for the device, and give back what torch keeps for later."""
        ...


class TorchDeviceMemory:
    """A GPU's. See `DeviceMemory`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def total(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[1])

    def free(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def held(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def peak_held(self) -> int:
        return torch.cuda.max_memory_reserved(self._device)

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
