"""A weight that was packed for the compiled kernels, and took the place of the loaded one."""

import torch
from torch import Tensor

from model_worker.kernels.cpu.library import KIND, CpuLibrary, EightBits, WeightView, address, view_of
from model_worker.kernels.interface import Table


class PackedWeight(Table):
    """`[out, in]`, in panels of `library.panel` outputs (see `source/linear.hpp`). float32 `x @ W.T + bias`, summed in float32: each row's bits depend
    on the row alone. `weight` float32 `[out, in]`, however it lies, is not kept; `dtype` float32 or float16."""

    def __init__(self, library: CpuLibrary, weight: Tensor, dtype: torch.dtype) -> None:
        self._out, self._in = weight.shape
        panels = -(-self._out // library.panel)
        self._data = torch.empty(panels * self._in * library.panel, dtype=dtype)
        library.of("pack", dtype)(address(weight), *weight.stride(), self._out, self._in, address(self._data))
        self._weight = address(self._data)
        self._multiply = library.of("multiply", dtype)
        self._gather = library.of("gather", dtype)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.shape[0]
        result = torch.empty(rows, self._out)
        if x.stride(-1) != 1:
            x = x.contiguous()
        if rows:
            self._multiply(address(x), x.stride(0), self._weight, address(bias), address(result), rows, self._in, self._out)
        return result

    def view(self, bias: Tensor | None) -> WeightView:
        """For kernels of whole layers."""
        return WeightView(KIND[self._data.dtype], self._out, self._in, self._weight, None, address(bias))

    def rows(self, ids: Tensor) -> Tensor:
        result = torch.empty(len(ids), self._in)
        self._gather(self._weight, self._in, address(ids), len(ids), address(result))
        return result


class EightBitWeight(Table):
    """As `PackedWeight`, in 8 bits, in groups of `library.group` numbers of a row with a scale each. Inputs are quantized in the same way, each row by
    itself, and products summed in integers within a group (see `source/eight_bits.hpp`). 9 bits a number in all."""

    def __init__(self, library: CpuLibrary, weight: Tensor) -> None:
        self._library = library
        self._out, self._in = weight.shape
        panels, groups = -(-self._out // library.panel), -(-self._in // library.group)
        self._values = torch.empty(panels * groups * library.group * library.panel, dtype=torch.uint8)
        self._scales = torch.empty(panels * groups * library.panel)
        self._view = view_of(EightBits(address(self._values), address(self._scales), self._out, self._in))
        library.pack_i8(address(weight), *weight.stride(), self._view)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        result = torch.empty(x.shape[0], self._out)
        if x.stride(-1) != 1:
            x = x.contiguous()
        if len(x):
            self._library.multiply_i8(address(x), x.stride(0), self._view, address(bias), address(result), len(x))
        return result

    def view(self, bias: Tensor | None) -> WeightView:
        """For kernels of whole layers."""
        values, scales = address(self._values), address(self._scales)
        return WeightView(KIND[torch.uint8], self._out, self._in, values, scales, address(bias))

    def rows(self, ids: Tensor) -> Tensor:
        result = torch.empty(len(ids), self._in)
        self._library.gather_i8(self._view, address(ids), len(ids), address(result))
        return result
