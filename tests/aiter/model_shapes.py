"""Small shapes of four architectures that between them use every kind of attention and of experts. Triton's kernels want powers of two."""

from dataclasses import replace

from model_worker.layers.rope_scaling import YarnScaling
from model_worker.models.experts_config import ClampedSwiGLU, ExpertsConfig
from model_worker.models.indexer_config import IndexerConfig
from model_worker.models.latent_config import LatentConfig
from model_worker.models.model_config import ModelConfig

LLAMA = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_model_len=64,
    rms_norm_eps=1e-5,
    rope_theta=5000.0,
    tie_word_embeddings=True,
)

_FEW_HEADS = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1}
_REST = {"max_model_len": 64, "rms_norm_eps": 1e-5, "rope_theta": 5000.0, "tie_word_embeddings": False}

QWEN3_MOE = ModelConfig(
    architecture="Qwen3MoeForCausalLM",
    **_FEW_HEADS,
    **_REST,
    head_dim=32,
    qk_norm=True,
    experts=ExpertsConfig(6, 2, 32, layers=frozenset({1}), renormalize=True),
)

GPT_OSS = ModelConfig(
    architecture="GptOssForCausalLM",
    **_FEW_HEADS,
    **_REST,
    head_dim=16,
    attention_bias=True,
    rope_scaling=YarnScaling(4.0, 16, 32.0, 1.0, 1.1, truncate=False),
    sliding_windows=(9, None),
    experts=ExpertsConfig(5, 2, 32, frozenset({0, 1}), renormalize=True, swiglu=ClampedSwiGLU(1.702, 1.0)),
)

DEEPSEEK_V3 = ModelConfig(
    architecture="DeepseekV3ForCausalLM",
    **_FEW_HEADS,
    **_REST,
    head_dim=16,
    latent=LatentConfig(
        q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, is_interleaved=True
    ),
    experts=ExpertsConfig(
        8, 2, 32, frozenset({1}), renormalize=True, num_shared=1, num_groups=4, num_groups_chosen=2, scale=1.5
    ),
)

SHAPES = {"Llama": LLAMA, "Qwen3-MoE": QWEN3_MOE, "gpt-oss": GPT_OSS, "DeepSeek-V3": DEEPSEEK_V3}

DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    architecture="DeepseekV32ForCausalLM",
    latent=replace(DEEPSEEK_V3.latent, indexer=IndexerConfig(num_heads=4, head_dim=32, num_chosen=12)),
)

GLM4_MOE = ModelConfig(
    architecture="Glm4MoeForCausalLM",
    **_FEW_HEADS,
    **_REST,
    head_dim=16,
    qk_norm=True,
    attention_bias=True,
    rotary_dim=8,
    experts=ExpertsConfig(8, 2, 32, frozenset({1}), renormalize=True, num_shared=1, scale=2.5),
)

MORE_SHAPES = {"DeepSeek-V3.2": DEEPSEEK_V32, "GLM-4-MoE": GLM4_MOE}
"""What the others have not: positions chosen by an index, heads that are rotated in part."""
