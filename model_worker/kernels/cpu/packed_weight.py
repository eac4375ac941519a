"""A weight that was packed for the compiled kernels, and took the place of the loaded one."""

import torch
from torch import Tensor

from model_worker.kernels.cpu.library import KINDS, CpuLibrary, MatrixView, WeightView, address, view_of
from model_worker.kernels.interface import Table


class PackedWeight(Table):
    """`[out, in]` as `source/kinds.hpp` has it. float32 `x @ W.T + bias`, summed in float32: each row's bits depend on the row alone. `weight` float32
    `[out, in]`, however it lies, is not kept. `dtype`:

    - float32 and float16 are multiplied by inputs in float32.
    - bfloat16: where the processor has such products, inputs are rounded to bfloat16 as well.
    - float32 and bfloat16 are kept in fewer bits where these say the same (see `source/compact.hpp`): bfloat16 in 12.5; float32 in 12.5 or 20.5 where its lowest
      two bytes or one are zero throughout. No number changes.
    - int8: groups of 32 numbers of a row have a scale each, 8.5 bits a number in all. Inputs are quantized in the same way, each row by itself, and
      products summed in integers within a group.
    """

    def __init__(self, library: CpuLibrary, weight: Tensor, dtype: torch.dtype) -> None:
        self._library = library
        self._out, self._in = weight.shape
        matrix = MatrixView(address(weight), *weight.shape, *weight.stride())
        for kind in KINDS[dtype]:
            self._kind, self._data = kind, library.memory.take(library.weight_bytes(kind, *weight.shape))
            view = self.view(None)
            if library.pack(matrix, view):
                break
            library.memory.give_back(self._data)
        self._view = view_of(view)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.shape[0]
        result = torch.empty(rows, self._out)
        if x.stride(-1) != 1:
            x = x.contiguous()
        if rows:
            view = self._view if bias is None else view_of(self.view(bias))
            self._library.multiply(view, address(x), x.stride(0), rows, address(result))
        return result

    @property
    def nbytes(self) -> int:
        """What a product reads."""
        return len(self._data)

    def view(self, bias: Tensor | None) -> WeightView:
        """For the kernels, as long as both live."""
        return WeightView(self._kind, self._out, self._in, address(self._data), address(bias))

    def rows(self, ids: Tensor) -> Tensor:
        result = torch.empty(len(ids), self._in)
        self._library.gather(self._view, address(ids), len(ids), address(result))
        return result
