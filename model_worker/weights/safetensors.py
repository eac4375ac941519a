"""Models in Hugging Face directories: config.json, tokenizer.json and one or more safetensors files."""

from collections.abc import Collection
from pathlib import Path

from model_worker.layers.weight_slot import WeightSlot
from model_worker.models.model_config import ModelConfig
from model_worker.weights.digest import weights_digest
from model_worker.weights.errors import WeightShapeMismatch, WeightUnexpected
from model_worker.weights.fused_weights import stored_parts
from model_worker.weights.hugging_face_config import HuggingFaceConfig
from model_worker.weights.stored_weight import StoredWeight
from model_worker.weights.tensor_files import TensorFiles, stored_tensors, weight_files
from model_worker.weights.weight_assembly import stored_weights
from tessera.values.known_models import ModelFileMissing
from tessera.values.model import ModelInfo
from tessera.values.tokenizer_digest import tokenizer_json_digest


class SafetensorsSource:
    """A model directory. See `ModelSource`."""

    def __init__(self, directory: Path, name: str) -> None:
        config = HuggingFaceConfig(directory)
        tokenizer = directory / "tokenizer.json"
        if not tokenizer.is_file():
            raise ModelFileMissing(f"{directory} has no tokenizer.json; save one with transformers' `save_pretrained`")
        self.config = config.model_config()
        self.stored_dtype = config.dtype()
        paths = weight_files(directory)
        self._files = TensorFiles()
        self._weights: dict[str, StoredWeight] = {}
        self._further: dict[str, StoredWeight] = {}
        for weight in stored_weights(stored_tensors(paths), config.quantization):
            self._add(weight)
        self.info = ModelInfo(
            name=name,
            architecture=self.config.architecture,
            vocab_size=self.config.vocab_size,
            max_model_len=self.config.max_model_len,
            eos_token_ids=config.eos_token_ids(),
            bos_token_id=config.bos_token_id(),
            tokenizer_digest=tokenizer_json_digest(tokenizer.read_bytes()),
            weights_digest=weights_digest([config.path, *paths]),
        )

    def names(self) -> Collection[str]:
        return self._weights.keys()

    def further_names(self) -> Collection[str]:
        return self._further.keys()

    def read(self, name: str, slot: WeightSlot) -> None:
        stored = self._weights.get(name) or self._further[name]
        if stored.shape != slot.shape:
            raise WeightShapeMismatch(f"{stored.path}: {name} is {stored.shape}, the model needs {slot.shape}")
        stored.read(self._files, slot)

    def _add(self, stored: StoredWeight) -> None:
        """By the usual names of what it holds."""
        for name, index in stored_parts(stored.name, stored.shape, self.config).items():
            if _is_unused(name, self.config):
                continue
            known = self._further if _is_further(name, self.config) else self._weights
            if other := known.get(name):
                raise WeightUnexpected(
                    f"{name} is there twice: as {other.name} in {other.path.name}, as {stored.name} in {stored.path.name};"
                    f" {stored.path.parent}"
                )
            known[name] = stored.part(index)


def _is_unused(name: str, config: ModelConfig) -> bool:
    """Whether a checkpoint may hold this although the model has no use for it: rotary tables, the head where it is the embedding."""
    return name.endswith(".rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")


def _is_further(name: str, config: ModelConfig) -> bool:
    """Whether it is of a layer behind the last, which predicts further tokens."""
    match name.split("."):
        case ["model", "layers", number, *_] if number.isdecimal():
            return config.num_layers <= int(number) < config.num_layers + config.num_mtp_layers
        case _:
            return False
