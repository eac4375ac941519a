"""AITER's enums as its compiled module gives them; it asks for one by calling its type with a number."""

import enum


class ActivationType(enum.IntEnum):
    """Members: of an expert's activation."""

    No = -1
    Silu = 0
    Gelu = 1
    Swiglu = 2


class QuantType(enum.IntEnum):
    """Members: what shares one scale."""

    No = 0
    per_Tensor = 1
    per_Token = 2
    per_1x32 = 3
    per_1x128 = 4
    per_128x128 = 5
