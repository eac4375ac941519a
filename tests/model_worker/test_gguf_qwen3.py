"""Qwen3 from GGUF files gives the logits and tokens of the transformers model it was written from."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tiny_gguf import gguf_metadata, gguf_tensors, write_gguf
from transformers import PreTrainedModel

from model_worker.weights.open_model import open_model
from tests.parity.architectures import check_source
from tests.parity.mode import Mode
from tests.parity.reference import Reference
from tests.parity.tiny_models import save_random, tiny_configs

MODES = (Mode(False, False, False), Mode(prefix_caching=True, chunked=True, alone=False))


def expand(model: PreTrainedModel, kind: gguf.GGMLQuantizationType) -> None:
    """Give the model's matrices the values that they have after a passage through `kind`."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            expanded = gguf.dequantize(gguf.quantize(parameter.detach().numpy(), kind), kind)
            parameter.data.copy_(torch.from_numpy(np.ascontiguousarray(expanded)))


@pytest.mark.parametrize(
    ("kind", "shape"), [("F32", 0), ("F32", 1), ("F16", 0), ("BF16", 1), ("Q8_0", 0), ("Q4_0", 1), ("Q5_1", 0)]
)
def test_logits_and_tokens(kind: str, shape: int, tmp_path: Path) -> None:
    """With and without a head of its own, biases, heads wider than a part of the hidden size."""
    format = gguf.GGMLQuantizationType[kind]
    config = tiny_configs()["Qwen3ForCausalLM"][shape]
    config.tie_word_embeddings = shape == 1
    model = save_random(config, tmp_path)
    metadata = gguf_metadata(model)
    path = write_gguf(tmp_path / "tiny.gguf", gguf_tensors(model), metadata, architecture="qwen3", kind=format)
    expand(model, format)
    model.save_pretrained(tmp_path)
    source = open_model(str(path))
    assert source.info.architecture == "Qwen3ForCausalLM"
    result = check_source(source, Reference(tmp_path), MODES)
    assert result.is_same, result
