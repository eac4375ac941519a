"""EAGLE and EAGLE-3 heads in directories as they are published: config.json, and safetensors files with `fc`, one layer, and what a head has of
its own."""

from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor

from model_worker.layers.weight_slot import WeightSlot
from model_worker.models.eagle_head import LAYER, EagleShape
from model_worker.models.model_config import ModelConfig
from model_worker.weights.errors import DraftMismatch, ModelFileDamaged, ModelUnsupported, WeightShapeMismatch
from model_worker.weights.hugging_face_config import HuggingFaceConfig
from model_worker.weights.tensor_files import TensorFiles, stored_tensors, weight_files
from model_worker.weights.weight_assembly import stored_weights

_IDS = ("d2t", "t2d")
"""What is added to the head's ids to get the model's; which of the model's ids the head knows, which follows from it."""


class EagleSource:
    """The head in `directory`, called `name`. Raises ModelError."""

    def __init__(self, directory: Path, name: str) -> None:
        self.name = name
        config = HuggingFaceConfig(directory)
        self._values = config.values
        self.config = config.model_config("LlamaForCausalLM")
        self._values.require("num_hidden_layers", self.config.num_layers, 1)
        self._files = TensorFiles()
        tensors = {_usual(tensor.name): tensor for tensor in stored_tensors(weight_files(directory))}
        self._ids = {key: tensors.pop(key) for key in _IDS if key in tensors}
        weights = stored_weights(list(tensors.values()), config.quantization)
        self._weights = {_usual(weight.name): weight for weight in weights}
        self.is_third = f"{LAYER}.hidden_norm.weight" in self._weights

    def names(self) -> Collection[str]:
        """Of its weights, the layer's as `layers.0`."""
        return self._weights.keys()

    def read(self, name: str, slot: WeightSlot) -> None:
        """As a `ModelSource` does."""
        stored = self._weights[name]
        if stored.shape != slot.shape:
            raise WeightShapeMismatch(f"{stored.path}: {name} is {stored.shape}, the head needs {slot.shape}")
        stored.read(self._files, slot)

    def shape(self, target: ModelConfig, target_name: str) -> EagleShape:
        """The head's, for a model of the shape `target`. Raises DraftMismatch where it is not for such a model."""
        own = self.config
        if own.vocab_size != target.vocab_size:
            raise DraftMismatch(
                f"{self.name} is a head for {own.vocab_size} token ids and cannot draft for {target_name} with its {target.vocab_size}"
            )
        target_size = self._values.number("target_hidden_size", int, own.hidden_size if self.is_third else target.hidden_size)
        given = "embed_tokens.weight" in self._weights
        if target_size != target.hidden_size or (own.hidden_size != target.hidden_size and not (self.is_third and given)):
            raise DraftMismatch(
                f"{self.name} is a head for hidden states of {target_size if self.is_third else own.hidden_size} numbers and cannot draft "
                f"for {target_name} with its {target.hidden_size}"
            )
        if not self.is_third:
            return EagleShape(own)
        return EagleShape(own, self._taps(target.num_layers), self._token_ids(), self._values.flag("norm_before_residual"))

    def _taps(self, num_layers: int) -> tuple[int, ...]:
        """Three layers of the model whose inputs the head takes: those that config.json names, else a low, a middle and a high one, as its
        authors do. vLLM counts inputs of layers (`eagle_aux_hidden_state_layer_ids`), SGLang outputs, in `eagle_config`."""
        key = "eagle_aux_hidden_state_layer_ids"
        inputs = self._values.get(key)
        outputs = self._values.inside("eagle_config").get(key)
        if inputs is None:
            inputs = [2, num_layers // 2, num_layers - 3] if outputs is None else [layer + 1 for layer in outputs]
        if not all(isinstance(layer, int) and 0 <= layer < num_layers for layer in inputs):
            raise ModelUnsupported(
                f"{self._values.path}: the head takes the inputs of layers {inputs}, the model has {num_layers}"
            )
        return tuple(inputs)

    def _token_ids(self) -> Tensor | None:
        size = self._values.number("draft_vocab_size", int, self.config.vocab_size)
        if "d2t" not in self._ids:
            if size != self.config.vocab_size:
                raise ModelFileDamaged(f"{self._values.path.parent} has {size} ids of its own and no d2t to say what they are")
            return None
        token_ids = torch.arange(size) + self._files.read(self._ids["d2t"]).to(torch.int64)
        if (
            len(torch.unique(token_ids)) < size
            or not 0 <= int(token_ids.min()) <= int(token_ids.max()) < self.config.vocab_size
        ):
            raise ModelFileDamaged(
                f"{self._ids['d2t'].path}: d2t names ids twice, or beyond the vocabulary of {self.config.vocab_size}"
            )
        return token_ids


def _usual(name: str) -> str:
    """Published heads call their layer `midlayer` or `layers.0`, with or without `model.` in front."""
    name = name.removeprefix("model.")
    return f"{LAYER}.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name
