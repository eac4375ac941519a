"""What a config.json says beyond what it says of a Llama, by architecture."""

from collections.abc import Callable
from dataclasses import replace

from model_worker.models.model_config import ModelConfig
from model_worker.weights.config_values import ConfigValues
from model_worker.weights.experts_config import qwen3_moe_experts


def _qwen3(shape: ModelConfig, config: ConfigValues) -> ModelConfig:
    return replace(shape, qk_norm=True, head_dim=config.number("head_dim", int, 128))


def _qwen3_moe(shape: ModelConfig, config: ConfigValues) -> ModelConfig:
    return replace(shape, qk_norm=True, experts=qwen3_moe_experts(config))


ADDITIONS: dict[str, Callable[[ModelConfig, ConfigValues], ModelConfig]] = {
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
}
"""Architecture -> the shape as read for a Llama, completed."""
