"""What a config.json says of experts."""

from model_worker.models.experts_config import ExpertsConfig
from model_worker.weights.config_values import ConfigValues


def qwen3_moe_experts(config: ConfigValues) -> ExpertsConfig:
    """Every `decoder_sparse_step`-th layer has them, but for `mlp_only_layers`."""
    step, dense = config.number("decoder_sparse_step", int, 1), config.get("mlp_only_layers", [])
    layers = range(config.number("num_hidden_layers", int))
    return ExpertsConfig(
        num_experts=config.number(config.first_of("num_experts", "num_local_experts"), int),
        num_chosen=config.number("num_experts_per_tok", int),
        intermediate_size=config.number("moe_intermediate_size", int),
        layers=frozenset(layer for layer in layers if layer not in dense and (layer + 1) % step == 0),
        renormalize=config.flag("norm_topk_prob"),
    )
