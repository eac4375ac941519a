"""What a config.json says beyond what it says of a Llama, by architecture."""

from collections.abc import Callable
from dataclasses import replace

from model_worker.models.indexer_config import IndexerConfig
from model_worker.models.latent_config import LatentConfig
from model_worker.models.model_config import ModelConfig
from model_worker.weights.config_values import ConfigValues
from model_worker.weights.experts_config import deepseek_experts, gpt_oss_experts, mixtral_experts, qwen3_moe_experts
from model_worker.weights.rope_config import DEFAULT_THETA, RopeConfig


def _qwen3(shape: ModelConfig, config: ConfigValues) -> ModelConfig:
    head_dim = config.number("head_dim", int, 128)
    return replace(shape, qk_norm=True, head_dim=head_dim, rotary_dim=head_dim)


def _qwen3_moe(shape: ModelConfig, config: ConfigValues) -> ModelConfig:
    return replace(shape, qk_norm=True, experts=qwen3_moe_experts(config))


def _deepseek_v3(shape: ModelConfig, config: ConfigValues) -> ModelConfig:
    latent = LatentConfig(
        q_lora_rank=config.optional("q_lora_rank", int),
        kv_lora_rank=config.number("kv_lora_rank", int),
        qk_nope_head_dim=config.number("qk_nope_head_dim", int),
        qk_rope_head_dim=config.number("qk_rope_head_dim", int),
        v_head_dim=config.number("v_head_dim", int),
        is_interleaved=config.flag("rope_interleave", True),
    )
    return replace(
        shape,
        head_dim=latent.qk_nope_head_dim + latent.qk_rope_head_dim,
        rotary_dim=latent.qk_rope_head_dim,
        num_mtp_layers=_num_mtp_layers(config),
        experts=deepseek_experts(config),
        latent=latent,
    )


def _deepseek_v32(shape: ModelConfig, config: ConfigValues) -> ModelConfig:
    config.require("indexer_rope_interleave", config.flag("indexer_rope_interleave"), False)
    config.number("q_lora_rank", int)  # the index has need of it
    shape = _deepseek_v3(shape, config)
    assert shape.latent is not None
    indexer = IndexerConfig(
        num_heads=config.number("index_n_heads", int, 64),
        head_dim=config.number("index_head_dim", int, 128),
        num_chosen=config.number("index_topk", int, 2048),
    )
    return replace(shape, latent=replace(shape.latent, indexer=indexer))


def _glm4_moe(shape: ModelConfig, config: ConfigValues) -> ModelConfig:
    return replace(
        shape,
        qk_norm=config.flag("use_qk_norm"),
        num_mtp_layers=_num_mtp_layers(config),
        experts=deepseek_experts(config),
    )


def _mixtral(shape: ModelConfig, config: ConfigValues) -> ModelConfig:
    config.require("sliding_window", config.get("sliding_window"), None)
    return replace(shape, experts=mixtral_experts(config))


def _gpt_oss(shape: ModelConfig, config: ConfigValues) -> ModelConfig:
    """Without `layer_types` every other layer slides, the first among them."""
    window = config.number("sliding_window", int, 128)
    types = config.get("layer_types", ["sliding_attention", "full_attention"] * shape.num_layers)[: shape.num_layers]
    for kind in types:
        config.require("layer_types", kind, "sliding_attention", "full_attention")
    return replace(
        shape,
        attention_bias=config.flag("attention_bias", True),
        sliding_windows=tuple(window if kind == "sliding_attention" else None for kind in types),
        experts=gpt_oss_experts(config),
    )


def _num_mtp_layers(config: ConfigValues) -> int:
    return config.number(config.first_of("num_nextn_predict_layers", "num_mtp_layers"), int, 0)


ADDITIONS: dict[str, Callable[[ModelConfig, ConfigValues], ModelConfig]] = {
    "DeepseekV32ForCausalLM": _deepseek_v32,
    "DeepseekV3ForCausalLM": _deepseek_v3,
    "Glm4MoeForCausalLM": _glm4_moe,
    "GptOssForCausalLM": _gpt_oss,
    "MixtralForCausalLM": _mixtral,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
}
"""Architecture -> the shape as read for a Llama, completed."""

ROPE_DEFAULTS = {
    "Glm4MoeForCausalLM": RopeConfig(DEFAULT_THETA, None, 0.5),
    "GptOssForCausalLM": RopeConfig(150000.0, None, 1.0),
    "MixtralForCausalLM": RopeConfig(1e6, None, 1.0),
}
"""Where transformers' class has others than theta 10,000 over whole heads."""

PARTIAL_ROTARY = frozenset(("Glm4MoeForCausalLM",))
"""Architectures that take `partial_rotary_factor`."""
