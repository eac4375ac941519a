"""Small random models with heads that have learned, in seconds, to foretell what they say."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from model_worker.kernels.torch_backend import TorchKernels
from model_worker.weights.open_model import load_model, open_model
from services.worker.config import SpeculationConfig
from services.worker.drafter import LoadedModel
from tests.parity.eagle_reference import EagleReference
from tests.parity.head_reference import own_output, train
from tests.parity.mtp_reference import MtpReference, save_layers
from tests.parity.tiny_models import save_random, tiny_configs

VOCAB_SIZE = 64
SHARPNESS = 4.0  # of the model's head: random ones like nearly all ids alike, and nothing could be foretold
DEPTH = 0.1  # of what layers add: so a token says something of the next one, which a head of one layer can learn in seconds
SEQUENCES, SEQUENCE_TOKENS, ROUNDS, RATE = 160, 28, 90, 1e-2


@dataclass(frozen=True)
class TrainedHead:
    """What to load: the model in `directory`, and speculation with so many drafts."""

    directory: Path
    proposer: str
    draft_model: str | None
    losses: list[float]

    def speculation(self, num_drafts: int) -> SpeculationConfig:
        """The worker's configuration, for 0 drafts without speculation."""
        return SpeculationConfig(num_drafts, self.proposer, self.draft_model) if num_drafts else SpeculationConfig()

    def load(self) -> LoadedModel:
        """The model."""
        source, kernels = open_model(str(self.directory)), TorchKernels()
        return LoadedModel(load_model(source, kernels), source.info, source, kernels, kernels)


def random_prompts(count: int) -> list[list[int]]:
    """Of three ids each."""
    draw = random.Random(1)
    return [draw.choices(range(VOCAB_SIZE), k=3) for _ in range(count)]


def trained_mtp(directory: Path, architecture: str = "Glm4MoeForCausalLM") -> TrainedHead:
    """Multi-token prediction."""
    model = _model(architecture, directory)
    head = MtpReference(model)
    losses = _train(head, model)
    save_layers([head], directory)
    return TrainedHead(directory, "mtp", None, losses)


def trained_eagle(directory: Path) -> TrainedHead:
    """EAGLE."""
    return _eagle(directory, EagleReference)


def trained_eagle3(directory: Path) -> TrainedHead:
    """EAGLE-3."""
    return _eagle(directory, lambda model: EagleReference(model, taps=(0, 1, 1)))


TRAINED: dict[str, Callable[[Path], TrainedHead]] = {"mtp": trained_mtp, "eagle": trained_eagle, "eagle3": trained_eagle3}


def _eagle(directory: Path, make: Callable[[PreTrainedModel], EagleReference]) -> TrainedHead:
    model = _model("LlamaForCausalLM", directory / "model")
    head = make(model)
    losses = _train(head, model)
    head.save(directory / "head", "midlayer" if head.taps else "layers.0")
    return TrainedHead(directory / "model", "eagle", str(directory / "head"), losses)


def _model(architecture: str, directory: Path) -> PreTrainedModel:
    config = tiny_configs()[architecture][0]
    config.vocab_size, config.num_hidden_layers = VOCAB_SIZE, 2
    model = save_random(config, directory)
    model.lm_head.weight.data *= SHARPNESS
    for name, values in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            values.data *= DEPTH
    model.save_pretrained(directory)
    return model


def _train(head: MtpReference | EagleReference, model: PreTrainedModel) -> list[float]:
    with torch.enable_grad():
        return train(head, model, own_output(model, SEQUENCES, SEQUENCE_TOKENS), ROUNDS, RATE)
