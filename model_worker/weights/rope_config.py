"""What a config.json says of the rotary embedding."""

from dataclasses import dataclass

from model_worker.layers.rope_scaling import Llama3Scaling, RopeScaling, YarnScaling, yarn_mscale
from model_worker.weights.config_values import ConfigValues
from model_worker.weights.errors import ModelUnsupported

DEFAULT_THETA = 10000.0


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """`partial_factor`: the part of a head that is rotated."""

    theta: float
    scaling: RopeScaling | None
    partial_factor: float


LLAMA_DEFAULTS = RopeConfig(DEFAULT_THETA, None, 1.0)


def rope_config(config: ConfigValues, defaults: RopeConfig = LLAMA_DEFAULTS) -> RopeConfig:
    """transformers 5 keeps it in `rope_parameters`, earlier ones in `rope_scaling` and at the top level. Raises ModelUnsupported."""
    rope = config.inside("rope_parameters", "rope_scaling")
    theta = rope.number("rope_theta", float, config.number("rope_theta", float, defaults.theta))
    partial_factor = rope.number(
        "partial_rotary_factor", float, config.number("partial_rotary_factor", float, defaults.partial_factor)
    )
    return RopeConfig(theta, _scaling(config, rope), partial_factor)


def _scaling(config: ConfigValues, rope: ConfigValues) -> RopeScaling | None:
    match rope.get("rope_type", rope.get("type", "default")):
        case "default":
            return None
        case "llama3":
            return Llama3Scaling(
                factor=rope.number("factor", float),
                low_freq_factor=rope.number("low_freq_factor", float),
                high_freq_factor=rope.number("high_freq_factor", float),
                original_max_len=rope.number("original_max_position_embeddings", int),
            )
        case "yarn":
            return _yarn(config, rope)
        case other:
            raise ModelUnsupported(f"{config.path}: rope_type {other!r} is not supported, only default, llama3 and yarn")


def _yarn(config: ConfigValues, rope: ConfigValues) -> YarnScaling:
    """Without an `attention_factor` it follows from `factor`, or from DeepSeek's `mscale` and `mscale_all_dim`."""
    max_len = config.number("max_position_embeddings", int)
    original_max_len = rope.number("original_max_position_embeddings", int, max_len)
    factor = rope.number("factor", float, max_len / original_max_len)
    mscale, mscale_all_dim = rope.number("mscale", float, 0.0), rope.number("mscale_all_dim", float, 0.0)
    plain = mscale == 0.0 or mscale_all_dim == 0.0
    attention_factor = yarn_mscale(factor) if plain else yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return YarnScaling(
        factor=factor,
        original_max_len=original_max_len,
        beta_fast=rope.number("beta_fast", float, 32.0),
        beta_slow=rope.number("beta_slow", float, 1.0),
        attention_factor=rope.number("attention_factor", float, attention_factor),
        score_factor=yarn_mscale(factor, mscale_all_dim) ** 2 if mscale_all_dim else 1.0,
        truncate=rope.flag("truncate", True),
    )
