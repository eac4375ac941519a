"""Small random models from transformers' own classes, a few shapes of each architecture that we run."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV32Config,
    Glm4MoeConfig,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB_SIZE = 199

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LATENT = {
    **_SHAPE,
    **_EXPERTS,
    "num_key_value_heads": 8,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
_SPARSE = {**_LATENT, "q_lora_rank": 24, "index_n_heads": 12, "index_head_dim": 24}
"""With these sizes no choice of a position is close: the last that is chosen and the first that is not lie 1e-4 standard deviations of a
row's scores apart or more, in every layer, for the prompts of `architectures` and their outputs."""
_GLM4 = {
    **_SHAPE,
    **_EXPERTS,
    "head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
_GPT_OSS = {**_SHAPE, "head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2}
_DEEPSEEK = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
_YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 64}


def tiny_configs() -> dict[str, list[PreTrainedConfig]]:
    """Architecture -> shapes that between them use all that we support of it. Their numbers of experts are such that no choice among them
    is close, for the prompts of `architectures` and their outputs: the last that is chosen and the first that is not have probabilities
    5e-5 apart or more, where rounding makes 1e-6."""
    return {
        "Glm4MoeForCausalLM": [
            Glm4MoeConfig(
                **_GLM4 | {"n_routed_experts": 10},
                use_qk_norm=True,
                attention_bias=True,
                n_group=1,
                topk_group=1,
                num_nextn_predict_layers=1,
            ),
            Glm4MoeConfig(**_GLM4, partial_rotary_factor=0.25, n_group=4, topk_group=1, norm_topk_prob=False),
        ],
        "GptOssForCausalLM": [
            GptOssConfig(**_GPT_OSS, sliding_window=9, rope_parameters=_YARN | {"truncate": False}),
            GptOssConfig(**_GPT_OSS, sliding_window=30, attention_bias=False, swiglu_limit=0.5),
        ],
        "LlamaForCausalLM": [
            LlamaConfig(**_SHAPE, rope_parameters=_LLAMA3, attention_bias=True, mlp_bias=True, head_dim=24),
            LlamaConfig(**_SHAPE, rope_parameters=_YARN, tie_word_embeddings=True),
        ],
        "MixtralForCausalLM": [MixtralConfig(**_SHAPE, num_local_experts=7, num_experts_per_tok=2)],
        "Qwen3ForCausalLM": [Qwen3Config(**_SHAPE, head_dim=16), Qwen3Config(**_SHAPE, head_dim=32, attention_bias=True)],
        "DeepseekV3ForCausalLM": [
            DeepseekV3Config(
                **_LATENT, q_lora_rank=24, n_group=4, topk_group=2, rope_parameters=_DEEPSEEK, num_nextn_predict_layers=1
            ),
            DeepseekV3Config(
                **_LATENT,
                q_lora_rank=None,
                n_group=1,
                topk_group=1,
                rope_interleave=False,
                attention_bias=True,
            ),
        ],
        "DeepseekV32ForCausalLM": [
            DeepseekV32Config(
                **_SPARSE, index_topk=16, n_group=4, topk_group=2, rope_parameters=_DEEPSEEK, num_nextn_predict_layers=1
            ),
            DeepseekV32Config(**_SPARSE, index_topk=40, n_group=1, topk_group=1, attention_bias=True),
        ],
        "Qwen3MoeForCausalLM": [
            Qwen3MoeConfig(**_SHAPE, **_EXPERTS, head_dim=16, num_experts=6, norm_topk_prob=True),
            Qwen3MoeConfig(**_SHAPE, **_EXPERTS, head_dim=16, num_experts=5, mlp_only_layers=[2], decoder_sparse_step=1),
        ],
    }


def save_random(config: PreTrainedConfig, directory: Path, **options: Any) -> PreTrainedModel:
    """A model whose logits spread over a few units, so that two best ones are rarely close; saved as transformers does (`options` are
    those of `save_pretrained`), with a tokenizer.json that is never read."""
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(11)
    for name, values in sorted((*model.named_parameters(), *model.named_buffers())):
        if "norm" in name:
            values.data.uniform_(0.5, 1.5, generator=generator)
        elif "inv_freq" not in name:
            values.data.normal_(0.0, 0.15, generator=generator)
    model.save_pretrained(directory, **options)
    (directory / "tokenizer.json").write_text("{}")
    return model
