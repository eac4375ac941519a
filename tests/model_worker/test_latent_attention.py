"""Latent attention over what the pool keeps gives what making every head's keys and values would give."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from paged_driver import PagedDriver, build_batch
from safetensors.torch import load_file, save_file

from model_worker.kernels.torch_backend import TorchKernels
from model_worker.kv_pool import KVPool
from model_worker.layers.latent_attention import LatentAttention
from model_worker.layers.rope_scaling import YarnScaling
from model_worker.layers.rotary import RotaryEmbedding, rotate
from model_worker.models.latent_config import LatentConfig
from model_worker.models.model_config import ModelConfig
from model_worker.weights.errors import WeightUnexpected
from model_worker.weights.open_model import load_model, open_model
from tests.parity.tiny_models import save_random, tiny_configs

LATENT = LatentConfig(
    q_lora_rank=None, kv_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, is_interleaved=False
)
CONFIG = ModelConfig(
    architecture="DeepseekV3ForCausalLM",
    vocab_size=50,
    hidden_size=32,
    intermediate_size=32,
    num_layers=1,
    num_heads=4,
    num_kv_heads=4,
    head_dim=20,
    max_model_len=64,
    rms_norm_eps=1e-6,
    rope_theta=5000.0,
    tie_word_embeddings=False,
    rotary_dim=8,
    latent=LATENT,
)
YARN = YarnScaling(4.0, 32, 32.0, 1.0, attention_factor=1.1, score_factor=1.3)


def unabsorbed(weights: dict[str, torch.Tensor], x: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """The paper's equations 1 to 8 for one sequence: every head's keys and values, causal softmax."""
    count, heads = len(x), config.num_heads
    rotation = RotaryEmbedding(8, config.rope_theta, config.rope_scaling)(torch.arange(count))
    query = (x @ weights["q_proj.weight"].T).view(count, heads, 20)
    content, shared = (x @ weights["kv_a_proj_with_mqa.weight"].T).split((20, 8), dim=1)
    content = torch.nn.functional.rms_norm(content, (20,), weights["kv_a_layernorm.weight"], 1e-6)
    key, value = (content @ weights["kv_b_proj.weight"].T).view(count, heads, 22).split((12, 10), dim=2)
    kernels = TorchKernels()
    turned = rotate(kernels, shared.unsqueeze(1), rotation).expand(-1, heads, -1)
    key = torch.cat((key, turned), dim=2)
    query = torch.cat((query[..., :12], rotate(kernels, query[..., 12:], rotation)), dim=2)
    scale = 20**-0.5 * (config.rope_scaling.score_factor if isinstance(config.rope_scaling, YarnScaling) else 1.0)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), float("-inf"))
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(dim=2), value)
    return mixed.flatten(1) @ weights["o_proj.weight"].T


@pytest.mark.parametrize("scaling", [None, YARN])
@pytest.mark.parametrize("chunks", [[13], [5, 8], [1] * 13, [9, 1, 1, 2]])
def test_absorbed_is_unabsorbed(scaling: YarnScaling | None, chunks: list[int]) -> None:
    config = replace(CONFIG, rope_scaling=scaling)
    kernels = TorchKernels()
    layer = LatentAttention(config, kernels)
    generator = torch.Generator().manual_seed(7)
    slots = {name.removeprefix("a."): slot.view for name, slot in layer.slots("a").items()}
    weights = {name: view.normal_(0.0, 0.3, generator=generator) for name, view in slots.items()}
    x = torch.randn(13, 32, generator=generator)
    kv = KVPool.of_shape(config.kv_shape, 8, 4)
    kv.keys(0)[: kv.num_blocks] = float("nan")  # what a request that failed may leave
    driver = PagedDriver(layer, kv)
    run = driver.start([0] * 13)
    run.table = [6, 2, 5, 0]
    outputs = []
    for count in chunks:
        batch = build_batch([(run, count)], 4)
        part = x[run.computed : run.computed + count]
        rotation = RotaryEmbedding(8, config.rope_theta, scaling)(batch.positions)
        outputs.append(layer(part, rotation, kernels.paged_attention(batch, kv), 0))
        run.computed += count
    torch.testing.assert_close(torch.cat(outputs), unabsorbed(weights, x, config), rtol=1e-4, atol=1e-5)


def test_the_pool_keeps_one_vector_for_all_heads() -> None:
    """DeepSeek-V3: 512 + 64 floats in each of 61 layers, where 128 heads of keys (192) and values (128) would take 71 times as much."""
    config = replace(CONFIG, num_layers=61, num_heads=128, latent=LatentConfig(1536, 512, 128, 64, 128, True))
    assert config.kv_shape.bytes_per_token() == 61 * 576 * 4


@pytest.mark.parametrize("architecture", ["DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"])
def test_layers_that_predict_further_tokens_are_left_aside(architecture: str, tmp_path: Path) -> None:
    """Published checkpoints hold one behind the last; one more than config.json says is an error."""
    save_random(tiny_configs()[architecture][0], tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.3.eh_proj.weight"] = torch.zeros(64, 128)
    save_file(weights, tmp_path / "model.safetensors")
    load_model(open_model(str(tmp_path)), TorchKernels())
    weights["model.layers.4.eh_proj.weight"] = torch.zeros(64, 128)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(WeightUnexpected, match=r"model\.layers\.4\.eh_proj\.weight is in"):
        load_model(open_model(str(tmp_path)), TorchKernels())
