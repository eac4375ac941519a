"""GGUF files: every weight arrives where it belongs, and what cannot be served is refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tiny_gguf import gguf_metadata, gguf_tensors, write_gguf
from tiny_llama import Pair, reference
from transformers import LlamaConfig, LlamaForCausalLM

from model_worker.kernels.torch_backend import TorchKernels
from model_worker.models.causal_lm import CausalLM
from model_worker.models.registry import UnknownArchitecture
from model_worker.weights.errors import (
    ModelFileDamaged,
    ModelUnsupported,
    WeightMissing,
    WeightShapeMismatch,
    WeightUnexpected,
)
from model_worker.weights.open_model import load_model, open_model
from tessera.values.known_models import ModelError


@pytest.fixture(scope="module")
def theirs() -> LlamaForCausalLM:
    return reference("gqa-tied")


def load(path: Path) -> CausalLM:
    return load_model(open_model(str(path)), TorchKernels())


def test_weights_config_and_description(pair: Pair, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", gguf_tensors(pair.theirs), gguf_metadata(pair.theirs))
    source = open_model(str(path))
    expected = dict(pair.theirs.named_parameters())
    slots = load_model(source, TorchKernels()).slots()
    assert slots.keys() == expected.keys()
    for name, slot in slots.items():
        assert torch.equal(slot.view, expected[name]), name
    assert source.config.rms_norm_eps == pytest.approx(pair.ours.config.rms_norm_eps, rel=1e-6)
    info = source.info
    assert (info.name, info.architecture, info.vocab_size, info.max_model_len) == ("tiny", "LlamaForCausalLM", 199, 256)
    assert (info.eos_token_ids, info.bos_token_id) == ((2, 5), 1)
    assert len(info.tokenizer_digest) == len(info.weights_digest) == 64


@pytest.mark.parametrize("rows_per_read", [7, 4096])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_quantized_weights_are_expanded(
    theirs: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, rows_per_read: int
) -> None:
    monkeypatch.setattr("model_worker.weights.gguf.ROWS_PER_READ", rows_per_read)
    format = gguf.GGMLQuantizationType[kind]
    path = write_gguf(tmp_path / "tiny.gguf", gguf_tensors(theirs), gguf_metadata(theirs), kind=format)
    slots = load(path).slots()
    for name, parameter in theirs.named_parameters():
        array = parameter.detach().numpy()
        expected = array if array.ndim == 1 else gguf.dequantize(gguf.quantize(array, format), format)
        assert np.array_equal(slots[name].view.numpy(), expected), name


@pytest.mark.parametrize("kind", ["Q2_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "MXFP4"])
def test_formats_that_only_llama_cpp_writes(tmp_path: Path, kind: str) -> None:
    """Any bytes are weights in them; large ones might be infinite scales."""
    theirs = LlamaForCausalLM(LlamaConfig(hidden_size=256, intermediate_size=512, vocab_size=19, num_hidden_layers=1))
    format = gguf.GGMLQuantizationType[kind]
    elements, size = gguf.GGML_QUANT_SIZES[format]
    draw = np.random.default_rng(3)
    raw = {}
    for name, array in gguf_tensors(theirs).items():
        is_matrix = array.ndim > 1
        raw[name] = draw.integers(0, 64, (len(array), array.shape[1] // elements * size), np.uint8) if is_matrix else array
    path = write_gguf(tmp_path / "tiny.gguf", raw, gguf_metadata(theirs), kind=format)
    slots = load(path).slots()
    for name, place in (("token_embd", "embed_tokens"), ("blk.0.ffn_down", "layers.0.mlp.down_proj")):
        expected = gguf.dequantize(raw[f"{name}.weight"], format)
        assert np.array_equal(slots[f"model.{place}.weight"].view.numpy(), expected)


def without(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda values: values.pop(key)


def with_(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda values: values.update({key: value})


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        (without("blk.1.attn_k.weight"), WeightMissing, r"model\.layers\.1\.self_attn\.k_proj\.weight is missing"),
        (without("token_embd.weight"), ModelFileDamaged, r"token_embd\.weight"),
        (with_("blk.0.mystery.weight", np.zeros(3, np.float32)), WeightUnexpected, r"blk\.0\.mystery\.weight is in"),
        (with_("blk.3.ffn_norm.weight", np.zeros(64, np.float32)), WeightUnexpected, r"model\.layers\.3\.post_attention"),
        (with_("blk.0.ffn_up.weight", np.zeros((95, 64), np.float32)), WeightShapeMismatch, r"ffn_up.*\(95, 64\).*\(96, 64\)"),
        (with_("blk.0.attn_q.weight", np.zeros((32, 64), np.float32)), WeightShapeMismatch, r"attn_q.*\(32, 64\).*\(64, 64\)"),
        (with_("rope_freqs.weight", np.zeros(4, np.float32)), ModelUnsupported, "scaled rotary"),
    ],
)
def test_wrong_tensors(theirs: LlamaForCausalLM, tmp_path: Path, change: Any, error: type[ModelError], named: str) -> None:
    tensors = gguf_tensors(theirs)
    change(tensors)
    path = write_gguf(tmp_path / "tiny.gguf", tensors, gguf_metadata(theirs))
    with pytest.raises(error, match=named):
        load(path)


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        (without("llama.block_count"), ModelFileDamaged, r"llama\.block_count"),
        (with_("llama.block_count", "three"), ModelUnsupported, r"llama\.block_count is a str"),
        (with_("llama.attention.head_count_kv", [2, 2, 2]), ModelUnsupported, r"head_count_kv is a list"),
        (with_("llama.rope.dimension_count", 4), ModelUnsupported, "part of a head"),
        (with_("llama.rope.scaling.type", "linear"), ModelUnsupported, "scaled rotary"),
        (with_("split.count", 2), ModelUnsupported, "several files"),
        (without("tokenizer.ggml.tokens"), ModelFileDamaged, r"tokenizer\.ggml\.tokens"),
    ],
)
def test_wrong_metadata(theirs: LlamaForCausalLM, tmp_path: Path, change: Any, error: type[ModelError], named: str) -> None:
    metadata = gguf_metadata(theirs)
    change(metadata)
    path = write_gguf(tmp_path / "tiny.gguf", gguf_tensors(theirs), metadata)
    with pytest.raises(error, match=named):
        load(path)


def test_an_unknown_architecture_names_the_known_ones(theirs: LlamaForCausalLM, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", {}, {}, architecture="mamba")
    with pytest.raises(UnknownArchitecture, match=r"'mamba'.*llama"):
        open_model(str(path))


def test_a_ggml_type_that_cannot_be_expanded(theirs: LlamaForCausalLM, tmp_path: Path) -> None:
    tensors, metadata = gguf_tensors(theirs), gguf_metadata(theirs)
    tensors["blk.0.ffn_norm.weight"] = np.zeros(64, np.int32)
    path = write_gguf(tmp_path / "tiny.gguf", tensors, metadata)
    with pytest.raises(ModelUnsupported, match=r"blk\.0\.ffn_norm\.weight has ggml type"):
        load(path)


def test_a_file_that_is_cut_short(theirs: LlamaForCausalLM, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", gguf_tensors(theirs), gguf_metadata(theirs))
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelFileDamaged, match="cut short"):
        load(path)
    path.write_bytes(b"not a model at all")
    with pytest.raises(ModelFileDamaged, match="not a GGUF file"):
        load(path)
