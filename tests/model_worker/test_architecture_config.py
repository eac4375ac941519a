"""What config.json of each architecture means, as published and as transformers 5 writes it; what is not computed is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from model_worker.models.experts_config import ClampedSwiGLU
from model_worker.models.indexer_config import IndexerConfig
from model_worker.models.model_config import ModelConfig
from model_worker.weights.errors import ModelFileDamaged, ModelUnsupported
from model_worker.weights.hugging_face_config import HuggingFaceConfig

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 6,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
}
QWEN3_MOE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
DEEPSEEK = LLAMA | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 2,
    "kv_lora_rank": 16,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "rope_theta": 20000,
    "scoring_func": "sigmoid",
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "v_head_dim": 10,
}
SPARSE = DEEPSEEK | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "q_lora_rank": 24,
    "index_head_dim": 32,
    "index_n_heads": 16,
    "index_topk": 256,
}
GLM4 = DEEPSEEK | {"architectures": ["Glm4MoeForCausalLM"], "rope_scaling": None, "head_dim": 16}
MIXTRAL = LLAMA | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "sliding_window": None}

GPT_OSS = LLAMA | {
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 128,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
}


def read(directory: Path, values: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(values))
    return HuggingFaceConfig(directory).model_config()


def test_qwen3_without_a_head_dim(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA | {"architectures": ["Qwen3ForCausalLM"]})
    assert config.head_dim == config.rotary_dim == 128 and config.qk_norm


@pytest.mark.parametrize(
    ("step", "dense", "layers"), [(1, [], {0, 1, 2, 3, 4, 5}), (1, [0, 3], {1, 2, 4, 5}), (2, [1], {3, 5}), (3, None, {2, 5})]
)
def test_which_layers_of_qwen3_have_experts(tmp_path: Path, step: int, dense: list[int] | None, layers: set[int]) -> None:
    config = read(tmp_path, QWEN3_MOE | {"decoder_sparse_step": step, "mlp_only_layers": dense})
    assert config.experts is not None and config.experts.layers == layers and not config.experts.renormalize


def test_deepseek_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, DEEPSEEK)
    assert (config.rope_theta, config.head_dim, config.rotary_dim, config.num_mtp_layers) == (20000.0, 20, 8, 1)
    assert config.latent is not None and config.latent.q_lora_rank is None and config.latent.is_interleaved
    assert config.experts is not None and config.experts.layers == {2, 3, 4, 5} and config.experts.renormalize
    assert (config.kv_shape.num_planes, config.kv_shape.num_kv_heads, config.kv_shape.head_dim) == (1, 1, 24)


def test_deepseek_with_an_index_as_published(tmp_path: Path) -> None:
    """Its key lies behind the latent in the pool."""
    config = read(tmp_path, SPARSE)
    assert config.latent is not None and config.latent.indexer == IndexerConfig(16, 32, 256)
    assert (config.kv_shape.num_planes, config.kv_shape.num_kv_heads, config.kv_shape.head_dim) == (1, 1, 24 + 32)


def test_an_index_that_cannot_be_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileDamaged, match="q_lora_rank is missing"):
        read(tmp_path, SPARSE | {"q_lora_rank": None})
    with pytest.raises(ModelUnsupported, match="indexer_rope_interleave True is not supported"):
        read(tmp_path, SPARSE | {"indexer_rope_interleave": True})


def test_layers_that_have_experts_may_be_listed(tmp_path: Path) -> None:
    config = read(tmp_path, SPARSE | {"mlp_layer_types": ["sparse", "dense"] * 3})
    assert config.experts is not None and config.experts.layers == {0, 2, 4}
    with pytest.raises(ModelUnsupported, match="mlp_layer_types 'none' is not supported"):
        read(tmp_path, SPARSE | {"mlp_layer_types": ["none"] * 6})


def test_half_of_a_head_is_rotated_in_glm4_unless_said_otherwise(tmp_path: Path) -> None:
    assert read(tmp_path, GLM4).rotary_dim == 8
    assert read(tmp_path, GLM4 | {"partial_rotary_factor": 0.25}).rotary_dim == 4
    assert read(tmp_path, GLM4 | {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 1.0}}).rotary_dim == 16


def test_mixtrals_defaults(tmp_path: Path) -> None:
    config = read(tmp_path, MIXTRAL)
    assert config.rope_theta == 1e6 and config.experts is not None
    assert (config.experts.num_chosen, config.experts.intermediate_size, config.experts.renormalize) == (2, 96, True)


def test_every_other_layer_of_gpt_oss_slides_unless_said_otherwise(tmp_path: Path) -> None:
    config = read(tmp_path, GPT_OSS)
    assert config.sliding_windows == (128, None, 128, None, 128, None) and config.attention_bias
    assert (config.rope_theta, config.rope_scaling is not None and config.rope_scaling.factor) == (150000.0, 32.0)
    assert config.experts is not None and config.experts.swiglu == ClampedSwiGLU(1.702, 7.0)
    types = ["full_attention"] * 5 + ["sliding_attention"]
    assert read(tmp_path, GPT_OSS | {"layer_types": types}).sliding_windows == (None,) * 5 + (128,)


@pytest.mark.parametrize(
    ("values", "error", "named"),
    [
        (DEEPSEEK | {"kv_lora_rank": None}, ModelFileDamaged, "kv_lora_rank is missing"),
        (DEEPSEEK | {"n_routed_experts": None}, ModelFileDamaged, "n_routed_experts is missing"),
        (DEEPSEEK | {"scoring_func": "softmax"}, ModelUnsupported, "scoring_func 'softmax'"),
        (DEEPSEEK | {"topk_method": "greedy"}, ModelUnsupported, "topk_method 'greedy'"),
        (
            DEEPSEEK | {"quantization_config": {"quant_method": "awq"}},
            ModelUnsupported,
            r"quantization_config\.quant_method 'awq'",
        ),
        (DEEPSEEK | {"partial_rotary_factor": 0.5}, ModelUnsupported, "partial_rotary_factor 0.5"),
        (GPT_OSS | {"layer_types": ["chunked_attention"] * 6}, ModelUnsupported, "layer_types 'chunked_attention'"),
        (MIXTRAL | {"sliding_window": 4096}, ModelUnsupported, "sliding_window 4096"),
        (QWEN3_MOE | {"num_experts": "8"}, ModelFileDamaged, "num_experts is '8'"),
        (QWEN3_MOE | {"use_sliding_window": True}, ModelUnsupported, "use_sliding_window True"),
        *[
            (QWEN3_MOE | {key: value}, ModelFileDamaged, f"{key} is {value}, it must be at least 1")
            for key, value in (("num_attention_heads", 0), ("num_hidden_layers", -1), ("max_position_embeddings", 0))
        ],
        (QWEN3_MOE | {"num_key_value_heads": 3}, ModelFileDamaged, "num_key_value_heads is 3, which does not divide"),
    ],
)
def test_what_is_missing_or_not_computed_is_named(
    tmp_path: Path, values: dict[str, Any], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        read(tmp_path, values)
