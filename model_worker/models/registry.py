"""Which class runs which architecture."""

from collections.abc import Callable

from model_worker.kernels.interface import Kernels
from model_worker.models.causal_lm import CausalLM
from model_worker.models.deepseek_v3 import DeepseekV3ForCausalLM
from model_worker.models.deepseek_v32 import DeepseekV32ForCausalLM
from model_worker.models.glm4_moe import Glm4MoeForCausalLM
from model_worker.models.gpt_oss import GptOssForCausalLM
from model_worker.models.llama import LlamaForCausalLM
from model_worker.models.mixtral import MixtralForCausalLM
from model_worker.models.model_config import ModelConfig
from model_worker.models.qwen3 import Qwen3ForCausalLM
from model_worker.models.qwen3_moe import Qwen3MoeForCausalLM
from tessera.values.known_models import ModelError

ARCHITECTURES: dict[str, Callable[[ModelConfig, Kernels], CausalLM]] = {
    "DeepseekV3ForCausalLM": DeepseekV3ForCausalLM,
    "DeepseekV32ForCausalLM": DeepseekV32ForCausalLM,
    "Glm4MoeForCausalLM": Glm4MoeForCausalLM,
    "GptOssForCausalLM": GptOssForCausalLM,
    "LlamaForCausalLM": LlamaForCausalLM,
    "MixtralForCausalLM": MixtralForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
}
"""Name in config.json -> class."""


class UnknownArchitecture(ModelError):
    """No class runs this architecture; the message lists those that can be run."""


def require_known(architecture: str) -> str:
    """`architecture` itself. Raises UnknownArchitecture if it cannot be run."""
    if architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnknownArchitecture(f"architecture {architecture!r} cannot be run; known architectures: {known}")
    return architecture


def build_model(config: ModelConfig, kernels: Kernels) -> CausalLM:
    """The model for `config` where the kernels compute, weights not yet loaded. Raises UnknownArchitecture."""
    with kernels.placement.in_force():
        return ARCHITECTURES[require_known(config.architecture)](config, kernels)
