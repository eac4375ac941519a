"""AITER's enums as its compiled module gives them; it asks for one by calling its type with a number."""

import enum


class _Named(enum.IntEnum):
    """Prints its class and name, as pybind's enums do and an IntEnum does not: AITER looks for kernels by that."""

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class ActivationType(_Named):
    """Members: of an expert's activation."""

    No = -1
    Silu = 0
    Gelu = 1
    Swiglu = 2


class QuantType(_Named):
    """Members: what shares one scale."""

    No = 0
    per_Tensor = 1
    per_Token = 2
    per_1x32 = 3
    per_1x128 = 4
    per_128x128 = 5
