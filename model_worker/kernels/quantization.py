"""What the weights of linear layers are kept in."""

from enum import StrEnum


class Quantization(StrEnum):
    """Activations are taken to 8 bits on the way into each product. Embeddings, routers, experts and what is per head stay as they were loaded."""

    NONE = "none"
    FP8 = "fp8"  # 8-bit floats, one scale per row of a weight and per token
    FP8_BLOCK = "fp8_block"  # one scale per 128 by 128 elements of a weight, and per 128 of a token
