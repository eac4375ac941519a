"""Small GGUF files as llama.cpp's converter writes them, from transformers' Llama."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from transformers import LlamaForCausalLM

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
MODEL_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_tensors(model: LlamaForCausalLM) -> dict[str, np.ndarray]:
    """The model's weights by GGUF name, float32, query and key rows permuted."""
    config = model.config
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


def gguf_metadata(model: LlamaForCausalLM) -> dict[str, Any]:
    """What describes `model` in a GGUF file, without its architecture."""
    config = model.config
    return {
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.rope.dimension_count": config.head_dim,
        "llama.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "llama.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
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
    """Write a GGUF file; matrices in the format `kind`, vectors as float32 (as llama.cpp does)."""
    writer = gguf.GGUFWriter(path, architecture)
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    for key, value in metadata.items():
        add[type(value)](key, value)
    for name, array in tensors.items():
        if array.ndim == 1:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
