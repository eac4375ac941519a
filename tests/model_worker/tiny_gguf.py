"""Small GGUF files as llama.cpp's converter writes them, from transformers' Llama and Qwen3."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from transformers import LlamaForCausalLM, PreTrainedModel

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
MODEL_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_tensors(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """The model's weights by GGUF name, float32, Llama's query and key rows permuted."""
    config, heads = model.config, {}
    if isinstance(model, LlamaForCausalLM):
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors = {}
    for name, parameter in model.named_parameters():
        module, kind = name.rsplit(".", 1)
        array = parameter.detach().numpy()
        if module in MODEL_NAMES:
            tensors[f"{MODEL_NAMES[module]}.{kind}"] = array
            continue
        _, _, layer, inner = module.split(".", 3)
        part = LAYER_NAMES[inner]
        if part in heads:  # the permutation of llama.cpp's convert_hf_to_gguf.py
            array = array.reshape(heads[part], 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        tensors[f"blk.{layer}.{part}.{kind}"] = np.ascontiguousarray(array)
    return tensors


def gguf_metadata(model: PreTrainedModel) -> dict[str, Any]:
    """What describes `model` in a GGUF file, without its architecture."""
    config = model.config
    shape = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
    }
    if isinstance(model, LlamaForCausalLM):
        shape["rope.dimension_count"] = config.head_dim
    return {f"{config.model_type}.{key}": value for key, value in shape.items()} | {
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(config.vocab_size)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 5,
    }


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    metadata: dict[str, Any],
    architecture: str = "llama",
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> Path:
    """Write a GGUF file; matrices in the format `kind` (bytes as they are), vectors as float32 (as llama.cpp does)."""
    writer = gguf.GGUFWriter(path, architecture)
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    for key, value in metadata.items():
        add[type(value)](key, value)
    for name, array in tensors.items():
        if array.ndim == 1:
            writer.add_tensor(name, array)
        else:
            raw = array if array.dtype == np.uint8 else gguf.quantize(array, kind)
            writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
