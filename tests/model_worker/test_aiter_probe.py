"""Which kernels of AITER serve a model on a machine. Only the decision: neither AITER nor a GPU is needed."""

from dataclasses import replace

import pytest
import torch

from model_worker.kernels.aiter.library import AiterUnavailable
from model_worker.kernels.aiter.probe import Choice, Demand, Flavour, Machine, choose_flavour, native_obstacle, require_native
from model_worker.models.experts_config import ClampedSwiGLU, ExpertsConfig
from model_worker.models.indexer_config import IndexerConfig
from model_worker.models.latent_config import LatentConfig
from model_worker.models.model_config import ModelConfig

MI300X = Machine("gfx942", has_compiled=True)

IN_BFLOAT16 = Demand(torch.bfloat16, torch.bfloat16, block_size=16)

LLAMA_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_model_len=8192,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    tie_word_embeddings=False,
)

DEEPSEEK_V3 = replace(
    LLAMA_8B,
    architecture="DeepseekV3ForCausalLM",
    hidden_size=7168,
    num_heads=128,
    num_kv_heads=128,
    latent=LatentConfig(1536, 512, 128, 64, 128, is_interleaved=True),
    experts=ExpertsConfig(256, 8, 2048, frozenset(range(3, 61)), renormalize=True, num_groups=8, num_groups_chosen=4),
)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("config", [LLAMA_8B, DEEPSEEK_V3])
def test_compiled_kernels_serve_what_they_are_made_for(arch: str, config: ModelConfig) -> None:
    choice = choose_flavour(config, IN_BFLOAT16, Machine(arch, has_compiled=True))
    assert choice == Choice(Flavour.NATIVE, f"{arch} has compiled kernels for this model")


@pytest.mark.parametrize(
    ("machine", "reason"),
    [(Machine("gfx1201", has_compiled=True), "gfx1201"), (Machine("gfx942", has_compiled=False), "hipcc")],
)
def test_triton_serves_on_other_machines(machine: Machine, reason: str) -> None:
    choice = choose_flavour(LLAMA_8B, IN_BFLOAT16, machine)
    assert choice.flavour is Flavour.TRITON and reason in choice.reason


@pytest.mark.parametrize(
    ("config", "demand", "reason"),
    [
        (LLAMA_8B, replace(IN_BFLOAT16, dtype=torch.float16), "bfloat16"),
        (LLAMA_8B, replace(IN_BFLOAT16, block_size=32), "block_size is 32"),
        (replace(LLAMA_8B, head_dim=64), IN_BFLOAT16, "64"),
        (replace(LLAMA_8B, num_kv_heads=1), IN_BFLOAT16, "32"),
        (replace(LLAMA_8B, sliding_windows=(128, None)), IN_BFLOAT16, "windows"),
        (
            replace(LLAMA_8B, experts=ExpertsConfig(8, 2, 64, frozenset({0}), True, swiglu=ClampedSwiGLU(1.7, 7.0))),
            IN_BFLOAT16,
            "sinks",
        ),
        (replace(LLAMA_8B, experts=ExpertsConfig(8, 2, 80, frozenset({0}), True)), IN_BFLOAT16, "4096 and 80"),
        (
            replace(
                DEEPSEEK_V3,
                latent=LatentConfig(1536, 512, 128, 64, 128, is_interleaved=True, indexer=IndexerConfig(64, 128, 2048)),
            ),
            IN_BFLOAT16,
            "chosen positions",
        ),
        (replace(DEEPSEEK_V3, latent=LatentConfig(None, 256, 128, 64, 128, is_interleaved=True)), IN_BFLOAT16, "256 and 64"),
        (DEEPSEEK_V3, replace(IN_BFLOAT16, kv_dtype=torch.float8_e4m3fnuz), "float8"),
        (replace(DEEPSEEK_V3, num_heads=256), IN_BFLOAT16, "256"),
    ],
)
def test_models_that_only_triton_serves(config: ModelConfig, demand: Demand, reason: str) -> None:
    choice = choose_flavour(config, demand, MI300X)
    assert choice.flavour is Flavour.TRITON and reason in choice.reason
    with pytest.raises(AiterUnavailable, match="choose kernels aiter-triton"):
        require_native(config, demand, MI300X)


def test_an_eight_bit_cache_and_few_latent_heads_are_served() -> None:
    assert native_obstacle(LLAMA_8B, replace(IN_BFLOAT16, kv_dtype=torch.float8_e4m3fnuz), MI300X) is None
    assert native_obstacle(replace(DEEPSEEK_V3, num_heads=4), IN_BFLOAT16, MI300X) is None
    require_native(LLAMA_8B, IN_BFLOAT16, MI300X)
