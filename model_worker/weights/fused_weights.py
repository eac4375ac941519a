"""The parts of weights that a checkpoint stores as one: all experts of a layer, gate above up, query above key above value."""

from collections.abc import Sequence

from model_worker.layers.experts import LLAMA_NAMES
from model_worker.models.mixtral import EXPERT_NAMES
from model_worker.models.model_config import ModelConfig

Index = tuple[int | slice, ...]
"""Which part of a stored tensor."""

_ALL: Index = ()

GPT_OSS = "GptOssForCausalLM"
"""It runs the stored form."""

MIXTRAL = "MixtralForCausalLM"
"""Its own checkpoints have other names than transformers gives the fused weights."""


def stored_parts(name: str, shape: Sequence[int], config: ModelConfig) -> dict[str, Index]:
    """The weights of the model that the stored tensor `name` of this shape holds, by their usual names; a single one is itself."""
    prefix, _, kind = name.rpartition(".")
    if prefix.endswith(".mlp.experts") and config.architecture != GPT_OSS and len(shape) == 3:
        return _experts(prefix, kind, shape, config)
    if prefix.endswith(".gate_up_proj"):
        half = shape[0] // 2
        return _rows(prefix, kind, "gate_up_proj", {"gate_proj": half, "up_proj": half})
    if prefix.endswith(".qkv_proj"):
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return _rows(prefix, kind, "qkv_proj", {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size})
    if config.architecture == MIXTRAL and prefix.endswith(".mlp.gate"):
        return {f"{prefix.removesuffix('.mlp.gate')}.block_sparse_moe.gate.{kind}": _ALL}
    return {name: _ALL}


def narrowed(index: Index, num_dims: int, dim: int, part: slice) -> Index:
    """Of the part `index` of a tensor with `num_dims` dimensions: the `part` of its own dimension `dim`."""
    parts = [*index, *[slice(None)] * (num_dims - len(index))]
    kept = [place for place, which in enumerate(parts) if isinstance(which, slice)]
    rows = parts[kept[dim]]
    first = (rows.start or 0) if isinstance(rows, slice) else 0
    parts[kept[dim]] = slice(first + part.start, first + part.stop)
    return tuple(parts)


def part_shape(index: Index, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the part `index` of a tensor of this shape."""
    parts = [*index, *[slice(None)] * (len(shape) - len(index))]
    return tuple(len(range(*which.indices(size))) for which, size in zip(parts, shape, strict=True) if isinstance(which, slice))


def _experts(prefix: str, kind: str, shape: Sequence[int], config: ModelConfig) -> dict[str, Index]:
    """transformers' `gate_up_proj` `[E, 2 * n, hidden]` and `down_proj` `[E, hidden, n]`."""
    gate, up, down = LLAMA_NAMES
    if config.architecture == MIXTRAL:
        gate, up, down = EXPERT_NAMES
        prefix = f"{prefix.removesuffix('.mlp.experts')}.block_sparse_moe.experts"
    half = shape[1] // 2
    match kind:
        case "gate_up_proj":
            parts = {gate: slice(0, half), up: slice(half, None)}
        case "down_proj":
            parts = {down: slice(None)}
        case _:
            return {f"{prefix}.{kind}": _ALL}
    return {f"{prefix}.{expert}.{part}.weight": (expert, rows) for expert in range(shape[0]) for part, rows in parts.items()}


def _rows(prefix: str, kind: str, fused: str, sizes: dict[str, int]) -> dict[str, Index]:
    """Rows of `{prefix}.{kind}`, from the first to the last; the last part takes what is left."""
    parts: dict[str, Index] = {}
    first, last = 0, list(sizes)[-1]
    for part, size in sizes.items():
        rows = slice(first, None if part == last else first + size)
        parts[f"{prefix.removesuffix(fused)}{part}.{kind}"] = (rows,)
        first += size
    return parts
