"""Which tensors of a checkpoint make a weight together."""

from collections.abc import Iterable, Mapping, Sequence

from model_worker.weights import fp8_weight, mxfp4_weight
from model_worker.weights.errors import WeightMissing
from model_worker.weights.quantization import MXFP4, Quantization
from model_worker.weights.stored_weight import PlainWeight, StoredWeight
from model_worker.weights.tensor_files import StoredTensor

_Found = tuple[StoredWeight, Iterable[str]]
"""A weight, and the names of what belongs to it."""


def stored_weights(tensors: Sequence[StoredTensor], quantization: Quantization | None) -> list[StoredWeight]:
    """The weights in `tensors`, of all files. What belongs to no quantized weight is taken for a plain one: scales without numbers too, whose
    name nobody expects. Raises WeightMissing for numbers without scales, ModelUnsupported and WeightShapeMismatch."""
    if quantization is None:
        return [PlainWeight(tensor) for tensor in tensors]
    by_name = {tensor.name: tensor for tensor in tensors}
    quantized, used = [], set()
    for tensor in tensors:
        found = _mxfp4(tensor, by_name) if quantization.method == MXFP4 else _fp8(tensor, by_name, quantization)
        if found is not None:
            quantized.append(found[0])
            used |= {tensor.name, *found[1]}
    return [*quantized, *(PlainWeight(tensor) for tensor in tensors if tensor.name not in used)]


def _fp8(tensor: StoredTensor, by_name: Mapping[str, StoredTensor], quantization: Quantization) -> _Found | None:
    """DeepSeek's scales are named `weight_scale_inv`, others' `weight_scale`; both are factors. Scales of activations are left aside:
    here these stay in float32."""
    if tensor.dtype != fp8_weight.DTYPE:
        return None
    names = f"{tensor.name}_scale_inv", f"{tensor.name}_scale"
    scale = next((by_name[name] for name in names if name in by_name), None)
    if scale is None:
        raise WeightMissing(f"{tensor.path}: {tensor.name} is in FP8, but {names[0]} is missing, {names[1]} too")
    prefix = tensor.name.rpartition(".")[0]
    return fp8_weight.fp8_weight(tensor, scale, quantization.block), (
        scale.name,
        f"{prefix}.input_scale",
        f"{prefix}.activation_scale",
    )


def _mxfp4(tensor: StoredTensor, by_name: Mapping[str, StoredTensor]) -> _Found | None:
    stem = tensor.name.removesuffix("_blocks")
    if stem == tensor.name:
        return None
    scales = by_name.get(f"{stem}_scales")
    if scales is None:
        raise WeightMissing(f"{tensor.path}: {tensor.name} is in MXFP4, but {stem}_scales is missing")
    return mxfp4_weight.mxfp4_weight(tensor, scales), (scales.name,)
