"""Models in GGUF files: quantized weights are expanded to float32 one at a time."""

from collections.abc import Collection
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from model_worker.layers.weight_slot import WeightSlot
from model_worker.weights.digest import weights_digest
from model_worker.weights.errors import ModelFileDamaged, ModelUnsupported, WeightShapeMismatch
from model_worker.weights.gguf_metadata import INTERLEAVED, GGUFMetadata, gguf_config, gguf_info
from tessera.values.gguf_header import GGUFFormatError, GGUFTensor, read_gguf_header

ROWS_PER_READ = 4096  # bounds the float32 copy of a large embedding that exists beside the model

_MODEL_WEIGHTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_WEIGHTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFSource:
    """A GGUF file. See `ModelSource`."""

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        try:
            header = read_gguf_header(path)
        except GGUFFormatError as error:
            raise ModelFileDamaged(str(error)) from error
        self._tensors = {hugging_face_name(tensor.name): tensor for tensor in header.tensors}
        metadata = GGUFMetadata(path, header.metadata)
        self.stored_dtype = torch.bfloat16  # as wide in range as what was quantized
        self.config = gguf_config(metadata, self._tensors)
        self.info = gguf_info(metadata, self.config, name, weights_digest([path]))

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def further_names(self) -> Collection[str]:
        return ()

    def read(self, name: str, slot: WeightSlot) -> None:
        """A part in the first dimension is read alone; of one in the second all bytes are read, some rows at a time."""
        tensor, view = self._tensors[name], slot.view
        if tensor.shape != slot.shape:
            raise WeightShapeMismatch(f"{self._path}: {tensor.name} is {tensor.shape}, the model needs {slot.shape}")
        assert slot.dim < 2, "no layer cuts further in"
        start, columns = (slot.start, slice(None)) if slot.dim == 0 else (0, slice(slot.start, slot.stop))
        slice_rows = 1
        if self.config.architecture in INTERLEAVED and (".q_proj." in name or ".k_proj." in name):
            slice_rows = self.config.head_dim
            view = _interleaved(view, slice_rows)
        for first in range(0, len(view), ROWS_PER_READ):
            part = view[first : first + ROWS_PER_READ]
            values = self._dequantized(tensor, start // slice_rows + first, len(part), tensor.shape[0] // slice_rows)
            part.copy_(torch.from_numpy(values).view(*part.shape[:-1], -1)[..., columns])

    def _dequantized(self, tensor: GGUFTensor, first: int, count: int, total: int) -> np.ndarray:
        """Of the tensor cut into `total` equal slices: `count` of them from `first` on, float32 `[count, elements of a slice]`."""
        try:
            kind = gguf.GGMLQuantizationType(tensor.ggml_type)
            block_elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            slice_bytes = int(np.prod(tensor.shape)) // total // block_elements * block_bytes
            raw = np.fromfile(self._path, np.uint8, count * slice_bytes, offset=tensor.offset + first * slice_bytes)
            if len(raw) < count * slice_bytes:
                raise ModelFileDamaged(f"{self._path} is cut short: it ends within {tensor.name}")
            return gguf.dequantize(raw.reshape(count, slice_bytes), kind)
        except (NotImplementedError, ValueError) as error:
            raise ModelUnsupported(
                f"{self._path}: {tensor.name} has ggml type {tensor.ggml_type}, which cannot be read"
            ) from error


def hugging_face_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor, e.g. blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; an unknown name as it is."""
    match name.split("."):
        case [part, kind] if part in _MODEL_WEIGHTS:
            return f"{_MODEL_WEIGHTS[part]}.{kind}"
        case ["blk", layer, part, kind] if part in _LAYER_WEIGHTS:
            return f"model.layers.{layer}.{_LAYER_WEIGHTS[part]}.{kind}"
        case _:
            return name


def _interleaved(view: Tensor, head_dim: int) -> Tensor:
    """A query or key weight `[heads * head_dim, ...]` as the file orders its rows, `[heads, head_dim / 2, 2, ...]`: llama.cpp rotates
    neighbouring elements where we rotate element i with i + head_dim / 2, so these rows lie side by side in the file."""
    pairs = view.shape[0] // head_dim, 2, head_dim // 2
    return view.view(*pairs, *view.shape[1:]).transpose(1, 2)
