"""Which class runs which architecture."""

from collections.abc import Callable

from tessera.values.known_models import ModelError

from model_worker.kernels.interface import Kernels
from model_worker.models.causal_lm import CausalLM
from model_worker.models.llama import LlamaForCausalLM
from model_worker.models.model_config import ModelConfig

ARCHITECTURES: dict[str, Callable[[ModelConfig, Kernels], CausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
}
"""Name in config.json -> class."""


class UnknownArchitecture(ModelError):
    """No class runs this architecture; the message lists those that can be run."""


def build_model(config: ModelConfig, kernels: Kernels) -> CausalLM:
    """The model for `config`, weights not yet loaded. Raises UnknownArchitecture."""
    model_class = ARCHITECTURES.get(config.architecture)
    if model_class is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnknownArchitecture(f"architecture {config.architecture!r} cannot be run; known architectures: {known}")
    return model_class(config, kernels)
