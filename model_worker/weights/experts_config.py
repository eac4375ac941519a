"""What a config.json says of experts."""

from model_worker.models.experts_config import ClampedSwiGLU, ExpertsConfig
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


def deepseek_experts(config: ConfigValues) -> ExpertsConfig:
    """DeepSeek-V3's, and those of models like it."""
    config.require("scoring_func", config.get("scoring_func", "sigmoid"), "sigmoid")
    config.require("topk_method", config.get("topk_method", "noaux_tc"), "noaux_tc")
    config.require("moe_layer_freq", config.get("moe_layer_freq", 1), 1)
    return ExpertsConfig(
        num_experts=config.number(config.first_of("n_routed_experts", "num_local_experts"), int),
        num_chosen=config.number("num_experts_per_tok", int),
        intermediate_size=config.number("moe_intermediate_size", int),
        layers=_sparse_layers(config),
        renormalize=config.flag("norm_topk_prob", True),
        num_shared=config.number("n_shared_experts", int, 0),
        num_groups=config.number("n_group", int, 1),
        num_groups_chosen=config.number("topk_group", int, 1),
        scale=config.number("routed_scaling_factor", float, 1.0),
    )


def _sparse_layers(config: ConfigValues) -> frozenset[int]:
    """Those that `mlp_layer_types` lists; without it all but the first `first_k_dense_replace`."""
    num_layers, types = config.number("num_hidden_layers", int), config.get("mlp_layer_types")
    if types is None:
        return frozenset(range(config.number("first_k_dense_replace", int), num_layers))
    for kind in types:
        config.require("mlp_layer_types", kind, "dense", "sparse")
    return frozenset(layer for layer, kind in enumerate(types[:num_layers]) if kind == "sparse")


def mixtral_experts(config: ConfigValues) -> ExpertsConfig:
    """In every layer; their size is `intermediate_size`."""
    return ExpertsConfig(
        num_experts=config.number(config.first_of("num_local_experts", "num_experts"), int),
        num_chosen=config.number("num_experts_per_tok", int, 2),
        intermediate_size=config.number("intermediate_size", int),
        layers=frozenset(range(config.number("num_hidden_layers", int))),
        renormalize=True,
    )


def gpt_oss_experts(config: ConfigValues) -> ExpertsConfig:
    """In every layer; their size is `intermediate_size`."""
    return ExpertsConfig(
        num_experts=config.number(config.first_of("num_local_experts", "num_experts"), int),
        num_chosen=config.number(config.first_of("num_experts_per_tok", "experts_per_token"), int),
        intermediate_size=config.number("intermediate_size", int),
        layers=frozenset(range(config.number("num_hidden_layers", int))),
        renormalize=True,
        swiglu=ClampedSwiGLU(config.number("swiglu_alpha", float, 1.702), config.number("swiglu_limit", float, 7.0)),
    )
