"""What a config.json says of weights that are stored in few bits."""

from dataclasses import dataclass

from model_worker.weights.config_values import ConfigValues
from model_worker.weights.errors import ModelUnsupported

FP8, COMPRESSED_TENSORS, MXFP4 = "fp8", "compressed-tensors", "mxfp4"


@dataclass(frozen=True, slots=True)
class Quantization:
    """`method` is one of the names above. `block`: rows and columns of a weight that share a scale, where scales are neither of whole
    weights nor of rows. Which weights are quantized shows in the files: those that have scales."""

    method: str
    block: tuple[int, int] | None = None


def quantization(config: ConfigValues) -> Quantization | None:
    """Of a whole config.json; None where all weights are plain. Raises ModelUnsupported for what cannot be decoded."""
    said = config.inside("quantization_config")
    if not said.names():
        return None
    method = said.get("quant_method")
    said.require("quant_method", method, FP8, COMPRESSED_TENSORS, MXFP4)
    match method:
        case "fp8":
            said.require("expert_dtype", said.get("expert_dtype", "fp8"), "fp8")
            return Quantization(method, _block(said, "weight_block_size"))
        case "compressed-tensors":
            return Quantization(method, _compressed(said))
        case _:
            return Quantization(method)


def _compressed(said: ConfigValues) -> tuple[int, int] | None:
    """Of weights in 8-bit floats, the only ones that are decoded; the block of all that have blocks."""
    said.require("format", said.get("format"), "float-quantized")
    groups, blocks = said.inside("config_groups"), set()
    for name in groups.names():
        weights = groups.inside(name).inside("weights")
        weights.require("type", weights.get("type"), "float")
        weights.require("num_bits", weights.get("num_bits"), 8)
        weights.require("symmetric", weights.get("symmetric", True), True)
        weights.require("strategy", weights.get("strategy"), "tensor", "channel", "block")
        if (block := _block(weights, "block_structure")) is not None:
            blocks.add(block)
    if len(blocks) > 1:
        raise ModelUnsupported(f"{said.path}: weights in blocks of different sizes ({sorted(blocks)}) are not supported")
    return next(iter(blocks), None)


def _block(said: ConfigValues, key: str) -> tuple[int, int] | None:
    sizes = said.get(key)
    if sizes is None:
        return None
    if not (isinstance(sizes, list) and len(sizes) == 2 and all(isinstance(size, int) and size > 0 for size in sizes)):
        raise ModelUnsupported(f"{said.path}: {key} {sizes!r} is not supported, only two numbers above 0")
    return sizes[0], sizes[1]
